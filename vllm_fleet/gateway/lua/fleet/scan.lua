-- What a request body asks for, found in one pass without decoding it.
--
-- Reads what Python's json.loads would read, as the engine does: top-level keys wherever they
-- stand, the last one where one stands twice, with escapes in keys and values. Strings are skipped
-- by a search for the closing quote and nested values by their brackets; what is skipped is not
-- validated: the engine refuses a broken body itself, and both sides read a sound one alike.
--
-- Tokens are estimated as a weighted sum over the bytes of the prompt's texts; how far it is off is
-- in tests/unit/gateway/test_tokens.py.

local bit = require "bit"
local cjson = require "cjson"
local ffi = require "ffi"

local find, sub, min, max = string.find, string.sub, math.min, math.max
local bytes_of = ffi.typeof("const uint8_t *")
local tobit, rshift = bit.tobit, bit.rshift

local M = {}

-- Thousandths of a token that a byte of a JSON text stands for: least squares of the relative error
-- over prose, code, messages and data, against the tokenizers of Qwen 3 and 3.5, whichever makes
-- more of a text. A character of several bytes counts at its first byte, an escape as its two
-- signs, and one by number as the character.
local LETTER, DIGIT, SPACE, BACKSLASH, SIGN = 230, 1400, 105, 480, 470
local LATIN, GREEK_ON, INDIC_ON, CJK, HANGUL_ON, EMOJI = 1700, 350, 900, 730, 870, 2300

local weight = ffi.new("int32_t[256]")

local function weigh(first, last, value)
  for c = first, last do
    weight[c] = value
  end
end

weigh(32, 126, SIGN)
weigh(65, 90, LETTER)
weigh(97, 122, LETTER)
weigh(48, 57, DIGIT)
weigh(32, 32, SPACE)
weigh(92, 92, BACKSLASH)
weigh(0xC2, 0xCD, LATIN)
weigh(0xCE, 0xDF, GREEK_ON)  -- also Cyrillic, Hebrew, Arabic
weigh(0xE0, 0xE2, INDIC_ON)  -- also quotes, dashes and arrows
weigh(0xE3, 0xE9, CJK)  -- also kana
weigh(0xEA, 0xEF, HANGUL_ON)  -- also full-width forms
weigh(0xF0, 0xF4, EMOJI)

-- Of a chat template around a message.
local A_MESSAGE = 4000

-- Bytes of a text that affinity looks at, on each end.
local FIRST = 512

-- How a top-level value counts: "chat" and "each", the strings in it, by element where "each" of
-- them is a prompt of its own; "raw", every byte, as a template writes it out as JSON.
local TEXTS = {
  messages = "chat", input = "chat", prompt = "chat", system = "chat", instructions = "chat",
  tools = "raw", functions = "raw",
  query = "chat", queries = "each", documents = "each", text_1 = "chat", text_2 = "each",
}
local LIMITS = {max_tokens = true, max_completion_tokens = true, max_output_tokens = true}
local MEDIA = {
  image_url = true, image = true, input_image = true, video_url = true, video = true,
  audio_url = true, input_audio = true, input_file = true, document = true,
}
-- Where base64 stands, in the forms of OpenAI and Anthropic.
local BINARY = {
  url = true, image_url = true, video_url = true, audio_url = true, data = true, file_data = true,
}

-- Position of the quote that closes the string opened at `open`, or nil. `p` points at the byte
-- before the body, so that p[1] is its first.
local function string_end(body, p, open)
  local from = open + 1
  local first_quote = find(body, '"', from, true)
  if not first_quote or p[first_quote - 1] ~= 92 then
    return first_quote
  end
  while true do
    local quote = find(body, '"', from, true)
    if not quote then
      return nil
    end
    if p[quote - 1] ~= 92 then
      return quote
    elseif p[quote - 2] == 92 then
      local first = quote - 2  -- an odd number of backslashes before a quote escapes it
      while p[first - 1] == 92 do
        first = first - 1
      end
      if (quote - first) % 2 == 0 then
        return quote
      end
    end
    from = quote + 1
  end
end

local function skip_space(p, at)
  -- Nearly always there is none or one. Without the loop a caller's own is compiled whole.
  local c = p[at]
  if c > 32 then
    return at
  elseif c == 32 and p[at + 1] > 32 then
    return at + 1
  end
  while c == 32 or c == 10 or c == 13 or c == 9 do
    at = at + 1
    c = p[at]
  end
  return at
end

local in_word = ffi.new("bool[256]")  -- what numbers, true, false and null are made of
for c = 0, 255 do
  in_word[c] = find(string.char(c), "^[%w+.-]") ~= nil
end

-- Position of the last byte of the number, true, false or null at `at`, or nil where there is none.
local function word_end(p, at)
  local last = at
  while in_word[p[last]] do
    last = last + 1
  end
  return last > at and last - 1 or nil
end

-- Position of the bracket that closes the one at `open`, or nil.
local function nested_end(body, p, open)
  local depth, at, size = 0, open, #body
  while at <= size do
    local c = p[at]
    if c == 34 then  -- "
      at = string_end(body, p, at)
      if not at then
        return nil
      end
    elseif c == 123 or c == 91 then  -- { [
      depth = depth + 1
    elseif c == 125 or c == 93 then  -- } ]
      depth = depth - 1
      if depth == 0 then
        return at
      end
    end
    at = at + 1
  end
  return nil
end

-- The value of the string from quote to quote; nil where an escape in it is no escape of JSON's or
-- stands for half a surrogate pair: then it equals no key and no model of ours.
local function string_value(body, open, close)
  local raw = sub(body, open + 1, close - 1)
  if not find(raw, "\\", 1, true) then
    return raw
  end
  local ok, decoded = pcall(cjson.decode, '["' .. raw .. '"]')
  return ok and decoded[1] or nil
end

-- The same for two bytes that follow each other, as this machine reads them: half as many steps.
local weight_of_two = ffi.new("uint16_t[65536]")
for c = 0, 65535 do
  weight_of_two[c] = weight[c % 256] + weight[rshift(c, 8)]
end
local two_bytes = ffi.typeof("const uint16_t *")

-- Thousandths of tokens of the bytes from..to, without escapes of the form \u.
local function plain_tokens(p, from, to)
  local total, at = 0, from
  while at <= to do
    local stop = min(at + 65535, to)  -- in blocks, so that the sum keeps to 32 bits
    local q, w, pairs_in = ffi.cast(two_bytes, p + at), weight_of_two, rshift(stop - at + 1, 4) * 8
    local sum, other = 0, 0  -- two that do not wait for each other
    for i = 0, pairs_in - 8, 8 do
      sum = tobit(sum + w[q[i]] + w[q[i + 1]] + w[q[i + 2]] + w[q[i + 3]])
      other = tobit(other + w[q[i + 4]] + w[q[i + 5]] + w[q[i + 6]] + w[q[i + 7]])
    end
    sum, at = sum + other, at + 2 * pairs_in
    while at <= stop do
      sum = tobit(sum + weight[p[at]])
      at = at + 1
    end
    total = total + sum
  end
  return total
end

local hex = ffi.new("uint8_t[256]")
for c = 0, 15 do
  hex[string.byte(string.format("%x", c))] = c
  hex[string.byte(string.format("%X", c))] = c
end

-- The first byte that UTF-8 has for a character, by the high byte of its \uXXXX, from 0800 on.
local lead = ffi.new("uint8_t[256]")
for high = 0x08, 0xFF do
  lead[high] = 0xE0 + math.floor(high / 16)
end
for high = 0xD8, 0xDF do
  lead[high] = high < 0xDC and 0xF0 or 0x80  -- a pair counts once
end

-- The same for the \uXXXX at `at`, whatever it stands for.
local function lead_byte(p, at)
  local high = hex[p[at + 2]] * 16 + hex[p[at + 3]]
  if high >= 0x08 then
    return lead[high]
  end
  local code = high * 256 + hex[p[at + 4]] * 16 + hex[p[at + 5]]
  return code < 0x80 and code or 0xC0 + rshift(code, 6)
end

local function escaped_tokens(p, from, to)
  local total, at = 0, from
  while at <= to do
    local c = p[at]
    if c ~= 92 then
      total = total + weight[c]
      at = at + 1
    elseif p[at + 1] == 117 then
      total = total + weight[lead_byte(p, at)]
      at = at + 6
    else
      total = total + weight[c] + weight[p[at + 1]]
      at = at + 2
    end
  end
  return total
end

-- Of a body larger than EXACT, one stretch of a long text in so many is weighed and stands for all
-- of them: as long as a sentence or two, so that what comes in turns is met in proportion.
local EXACT, STRETCH, ONE_OF = 65536, 256, 4
local SPAN = STRETCH * ONE_OF
local ESCAPE = 92 + 256 * 117  -- \u, as two bytes that this machine reads

local function has_escape(p, from, to)
  local even, odd = ffi.cast(two_bytes, p + from), ffi.cast(two_bytes, p + from + 1)
  for i = 0, rshift(to - from, 1) do
    if even[i] == ESCAPE or odd[i] == ESCAPE then
      return true
    end
  end
  return false
end

-- Where the first sign begins that does not begin before `at`.
local function whole_from(p, at)
  for back = 1, 5 do
    if p[at - back] == 92 and p[at - back + 1] == 117 then
      return at - back + 6
    end
  end
  return at
end

local function sampled_tokens(p, from, to)
  local total, at = 0, from
  while at <= to do
    local stop = min(at + STRETCH - 1, to)
    local tokens = has_escape(p, at, stop) and escaped_tokens(p, whole_from(p, at), stop)
        or plain_tokens(p, at, stop)
    -- The last stretch stands for what is left.
    total = total + tokens * min(SPAN, to - at + 1) / (stop - at + 1)
    at = at + SPAN
  end
  return total
end

-- Where the next \u stands, looked up once for all strings before it; nil where samples are taken.
local next_escape

local function text_tokens(body, p, from, to)
  if not next_escape then
    return sampled_tokens(p, from, to)
  elseif next_escape < from then
    next_escape = find(body, "\\u", from, true) or math.huge
  end
  return next_escape < to and escaped_tokens(p, from, to) or plain_tokens(p, from, to)
end

-- What every tokenizer makes at least of a text: words are cut apart, a token holds at most three
-- digits, on average of any text fewer than eight Chinese characters, and of other signs any
-- number. In thousandths, as above.
local function least_tokens(_, p, from, to)
  local total, at, word = 0, from, false
  while at <= to do
    local c, size = p[at], 1
    if c == 92 then
      size = 2
      c = 0
      if p[at + 1] == 117 then
        size = 6
        c = lead_byte(p, at)
      end
    end
    if c >= 97 and c <= 122 or c >= 65 and c <= 90 then
      if not word then
        total = total + 1000
      end
      word = true
    elseif c >= 0xC2 then
      total = total + (c >= 0xE3 and c <= 0xE9 and 125 or 0)
      word = true  -- its letters go with those beside them
    elseif c < 0x80 then
      word = false
      if c >= 48 and c <= 57 then
        total = total + 333
      end
    end
    at = at + size
  end
  return total
end

-- Whether the long string that begins at `from`, under a key, is base64, not text.
local function is_binary(body, key, key_end, from)
  return key_end - key < 11 and BINARY[sub(body, key + 1, key_end - 1)]
      and (sub(body, from, from + 4) == "data:"
           or not find(sub(body, from, from + 255), "[^%w+/=_\\-]"))
end

-- Walk the nested value at `open`, adding up its strings by `measure`. Returns the position of its
-- last bracket (nil: none) and what was found.
local function walk(body, p, open, measure)
  local depth, at, size = 0, open, #body
  local total, media, longest, began, objects = 0, 0, 0, 0, false
  local key, key_end, user, first_end
  local overhead = measure == text_tokens and A_MESSAGE or 0
  while at <= size do
    local c = p[at]
    if c == 34 then
      local close = find(body, '"', at + 1, true)
      if close and p[close - 1] == 92 then
        close = string_end(body, p, at)
      end
      if not close then
        return nil
      end
      local after = close + 1
      if p[after] ~= 44 and p[after] ~= 58 then
        after = skip_space(p, after)
      end
      if p[after] == 58 then  -- a key
        key, key_end = at, close
        at = after
      else
        local length = close - at - 1
        if key and key_end - key == 5 and length < 16 then
          c = p[key + 1]
          if c == 116 and sub(body, key + 1, key_end - 1) == "type" then
            media = media + (MEDIA[sub(body, at + 1, close - 1)] and 1 or 0)
            length = 0  -- no part of the prompt
          elseif c == 114 and length == 4 and depth == 2 and p[at + 1] == 117
              and sub(body, key + 1, key_end - 1) == "role"
              and sub(body, at + 1, close - 1) == "user" then
            user = true
          end
        end
        if length > 256 then
          if not (key and is_binary(body, key, key_end, at + 1)) then
            total = total + measure(body, p, at + 1, close - 1)
          end
        elseif length > 0 then
          total = total + measure(body, p, at + 1, close - 1)
        end
        if depth == 1 then
          longest, began = max(longest, total - began), total
        end
        key = nil
        at = close
      end
    elseif c == 123 or c == 91 then
      depth = depth + 1
      if c == 123 then
        objects = true
        if depth == 2 then
          total = total + overhead
        end
      end
      key = nil
    elseif c == 125 or c == 93 then
      depth = depth - 1
      if depth <= 1 then
        longest, began = max(longest, total - began), total
        if user then
          user, first_end = nil, first_end or at
        end
      end
      if depth == 0 then
        return at, total, longest, media, first_end or at, objects
      end
      key = nil
    elseif c ~= 44 and c ~= 32 and c ~= 10 and c ~= 13 and c ~= 9 and c ~= 58 then
      -- A number, true, false or null. Numbers outside objects are tokens.
      local last = at
      c = p[at + 1]
      while at < size and c ~= 44 and c ~= 93 and c ~= 125 and c ~= 32 and c ~= 10 and c ~= 13 do
        at = at + 1
        c = p[at + 1]
      end
      if not objects and p[last] <= 57 then
        total = total + 1000
      end
      key = nil
    end
    at = at + 1
  end
  return nil
end

-- Tokens of the text value at..last, of the longest prompt in it, media in it, and the end of what
-- affinity looks at; for a nested value `last` is found here. nil where it has no end.
local function text_value(body, p, how, at, last, measure)
  if last then
    local tokens = last - at > 1 and measure(body, p, at + 1, last - 1) or 0
    return last, tokens, tokens, 0, min(last - 1, at + 2 * FIRST)
  elseif how == "raw" then
    last = nested_end(body, p, at)
    local tokens = last and plain_tokens(p, at, last)
    return last, tokens, tokens, 0, last
  end
  local total, longest, media, first_end, objects
  last, total, longest, media, first_end, objects = walk(body, p, at, measure)
  if last and how == "chat" then
    -- A list of strings, or of lists of numbers, is several prompts; a list of numbers is one.
    local first = p[skip_space(p, at + 1)]
    if objects or first >= 45 and first <= 57 then
      longest = total
    end
  end
  return last, total, longest, media, first_end
end

-- The text that affinity hashes: the first messages up to the first of a user, or the first prompt;
-- where it is long, both ends of it.
local function first_text(body, from, to)
  if to - from < 2 * FIRST then
    return sub(body, from, to)
  end
  return sub(body, from, from + FIRST - 1) .. sub(body, to - FIRST + 1, to)
end

local function number(body, at, last)
  return tonumber(sub(body, at, last))
end

-- Books what the key `name` with the value at..last says. `c` is the value's first byte.
local function note(body, result, name, c, at, last)
  if name == "model" then
    result.model_from, result.model_to = at, last
    if c == 34 then
      -- A value that cannot be decoded names no model: \239\191\189 is U+FFFD.
      result.kind, result.model = "string", string_value(body, at, last) or "\239\191\189"
      if result.model == "" then
        result.kind, result.model = "missing", nil
      end
    elseif sub(body, at, last) == "null" then
      result.kind, result.model = "missing", nil
    else
      result.kind, result.model = "type", nil
    end
  elseif name == "stream" then
    result.stream = sub(body, at, last) == "true"
  elseif LIMITS[name] then
    result.max_tokens = number(body, at, last) or result.max_tokens
  elseif name == "n" then
    result.n = number(body, at, last)
  elseif name == "stream_options" then
    result.stream_options, result.include_usage = nil, false
    if c == 123 then
      local ok, options = pcall(cjson.decode, sub(body, at, last))
      result.stream_options = {at, last}
      result.include_usage = ok and options.include_usage == true
    end
  elseif name == "truncate_prompt_tokens" then
    result.truncates = c ~= 110  -- null
  elseif name == "truncation" then
    result.truncates = sub(body, at, last) == '"auto"'
  end
end

local NOTED = {
  model = true, stream = true, n = true, stream_options = true, truncate_prompt_tokens = true,
  truncation = true, max_tokens = true, max_completion_tokens = true, max_output_tokens = true,
}

local BAD = {kind = "json"}

-- What the body asks for:
--   kind            "string" · "missing" (no model, null or "") · "type" (not a string) ·
--                   "json" (not one JSON object; then nothing else is set)
--   model           the name; model_from, model_to: where its value stands, quotes included
--   stream          whether a stream is wanted
--   max_tokens      of max_tokens, max_completion_tokens and max_output_tokens the last; or nil
--   n               answers wanted; or nil
--   stream_options  {from, to}, where the object stands; include_usage: what it says
--   truncates       whether the engine is to cut a prompt that is too long
--   first           the text for affinity, or nil
--   tokens          estimate for all prompts in it; longest: for the longest of them
--   media           images, sounds, videos and files in it, of which nothing is in `tokens`
function M.request(body)
  local p = ffi.cast(bytes_of, body) - 1
  local size = #body
  local parts = {}
  local result = {kind = "missing", stream = false, include_usage = false, truncates = false,
                  tokens = 0, longest = 0, media = 0, parts = parts,
                  -- room for what most have
                  model = nil, model_from = nil, model_to = nil, max_tokens = nil, first = nil}
  next_escape = size <= EXACT and 0 or nil
  local at = 1
  if sub(body, 1, 3) == "\239\187\191" then  -- a byte order mark, which Python skips too
    at = 4
  end
  at = skip_space(p, at)
  if p[at] ~= 123 or at > size then
    return BAD
  end
  at = skip_space(p, at + 1)
  if p[at] == 125 then
    return skip_space(p, at + 1) > size and result or BAD
  end
  while true do
    if at > size or p[at] ~= 34 then
      return BAD
    end
    local key_end = string_end(body, p, at)
    if not key_end then
      return BAD
    end
    -- The longest key of ours has 22 letters, of at most six bytes each.
    local name = key_end - at <= 133 and string_value(body, at, key_end)
    at = skip_space(p, key_end + 1)
    if p[at] ~= 58 then  -- :
      return BAD
    end
    at = skip_space(p, at + 1)
    if at > size then
      return BAD
    end
    local c = p[at]
    local how = name and TEXTS[name]
    local last
    if c == 34 then
      last = string_end(body, p, at)
      if last and how then
        parts[name] = {at, text_value(body, p, how, at, last, text_tokens)}
      end
    elseif c == 123 or c == 91 then
      if how then
        local part = {at, text_value(body, p, how, at, nil, text_tokens)}
        parts[name], last = part, part[2]
      else
        last = nested_end(body, p, at)
      end
    else
      last = word_end(p, at)
      if how then
        parts[name] = nil
      end
    end
    if not last then
      return BAD
    end
    if name and NOTED[name] then
      note(body, result, name, c, at, last)
    end
    at = skip_space(p, last + 1)
    if at > size then
      return BAD
    end
    c = p[at]
    if c == 125 then
      if skip_space(p, at + 1) <= size then
        return BAD
      end
      break
    elseif c ~= 44 then  -- ,
      return BAD
    end
    at = skip_space(p, at + 1)
  end
  for _, part in pairs(parts) do
    result.tokens = result.tokens + part[3]
    result.longest = result.longest + part[4]
    result.media = result.media + part[5]
  end
  result.tokens = math.ceil(result.tokens / 1000)
  result.longest = math.ceil(result.longest / 1000)
  local first = parts.messages or parts.prompt or parts.input
  if first then
    result.first = first_text(body, first[1], first[6])
  end
  return result
end

-- What `model` the body names: kind and name, as above.
function M.model(body)
  local result = M.request(body)
  return result.kind, result.model
end

-- Tokens that the longest prompt of this request has at the very least, by any tokenizer. Slower
-- than the estimate, and asked for only where the estimate speaks for a refusal.
function M.least(body, request)
  local p = ffi.cast(bytes_of, body) - 1
  local total = 0
  for name, part in pairs(request.parts) do
    local how, at = TEXTS[name], part[1]
    if how ~= "raw" then
      local last = p[at] == 34 and part[2] or nil
      local _, _, longest = text_value(body, p, how, at, last, least_tokens)
      total = total + longest
    end
  end
  return math.floor(total / 1000)
end

return M
