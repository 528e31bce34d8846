-- How many tokens a request cost, read from the engine's answer.
--
-- Answers in one piece carry `usage` at their top level; a stream of chat or completions carries
-- it in a last chunk, if the client asked for it. Where it did not, the gateway asks and takes that
-- chunk out again. Streams of messages and responses always carry it. Where an answer says
-- nothing, the estimate of the request counts, and of a stream that was cut its chunks.

local cjson = require "cjson"
local ffi = require "ffi"

local byte, find, sub = string.byte, string.find, string.sub
local bytes_of = ffi.typeof("const uint8_t *")

local M = {}

-- Tokens of an answer for which nothing, or more than this, is allowed for. A low estimate harms
-- nobody, as what was used is settled at the end; a high one shuts out requests that would fit.
local ANSWER = 512
local MEDIUM = 1000  -- of an image or a sound, whose size is not looked at
-- Bytes of one event: more is not kept back, as the chunk that we take out is a small one; and
-- more is not looked into for a usage.
local LONGEST_HIDDEN, LONGEST_READ = 65536, 8388608
local LONGEST_USAGE = 8192

-- What each path costs: whether it writes an answer, takes `stream_options`, is free.
local PATHS = {
  ["/v1/chat/completions"] = {writes = true, options = true},
  ["/v1/completions"] = {writes = true, options = true},
  ["/v1/messages"] = {writes = true},
  ["/v1/responses"] = {writes = true},
  ["/v1/messages/count_tokens"] = {free = true},
}
local OTHER = {}

local function path_of(uri)
  return PATHS[uri] or PATHS[uri:match("/v1/.+$") or ""] or OTHER
end

-- Tokens to charge for a request before it is answered: all, and those of the prompt.
-- `found` is what scan.request() made of the body.
function M.estimate(uri, found)
  local path = path_of(uri)
  if path.free then
    return 0, 0
  end
  local prompt, answer = (found.tokens or 0) + MEDIUM * (found.media or 0), 0
  if path.writes then
    answer = math.max(found.n or 1, 1) * math.min(math.max(found.max_tokens or ANSWER, 0), ANSWER)
  end
  return prompt + answer, prompt
end

-- The body with usage asked for in its stream, or nil where nothing is to be done.
function M.ask(uri, found, body)
  if not found.stream or found.include_usage or not path_of(uri).options then
    return nil
  end
  local at = found.stream_options
  if not at then
    -- As the last key, so that it also stands behind a `"stream_options": null`.
    local close = #body
    while byte(body, close) ~= 125 do
      close = close - 1
    end
    return sub(body, 1, close - 1) .. ',"stream_options":{"include_usage":true}' .. sub(body, close)
  end
  local from, to = at[1], at[2]
  local options = sub(body, from, to - 1)
  local empty = not find(options, "[^{ \t\r\n]")
  -- Without usage this one meant nothing; with it every chunk would carry some.
  local continuous = find(options, "continuous_usage_stats", 1, true)
      and ',"continuous_usage_stats":false' or ""
  return table.concat({sub(body, 1, from - 1), options, empty and "" or ",",
                       '"include_usage":true', continuous, sub(body, to)})
end

local function number(value)
  return type(value) == "number" and value >= 0 and value < 1e12 and math.floor(value) or nil
end

-- Book the usage that a decoded object carries, in any of the engine's forms. Returns it.
local function note(s, value)
  local usage = value.usage
  if type(usage) ~= "table" and type(value.response) == "table" then
    usage = value.response.usage  -- an event of responses
  end
  if type(usage) ~= "table" and type(value.message) == "table" then
    usage = value.message.usage  -- the first event of messages
  end
  if type(usage) ~= "table" then
    return nil
  end
  local completion = number(usage.completion_tokens) or number(usage.output_tokens)
  local prompt = number(usage.prompt_tokens)
  local input = number(usage.input_tokens)
  if not prompt and input then
    -- Anthropic's form counts what came from the cache apart, OpenAI's does not have these keys.
    prompt = input + (number(usage.cache_read_input_tokens) or 0)
        + (number(usage.cache_creation_input_tokens) or 0)
  end
  local total = number(usage.total_tokens)
  if not prompt and total then
    prompt = math.max(total - (completion or 0), 0)
  end
  -- Usage in several chunks counts up.
  s.prompt = math.max(prompt or 0, s.prompt or 0)
  s.completion = math.max(completion or 0, s.completion or 0)
  return usage
end

-- Read a piece of a JSON object for the top-level key `usage`. Only the place in the nesting is
-- kept from piece to piece, so that an answer of any size costs no memory; and what a client sent
-- and the engine repeats (tools, metadata) stands deeper, or in strings.
local function walk(s, text)
  local p = ffi.cast(bytes_of, text) - 1
  local at, size, depth = 1, #text, s.depth
  local from = s.value and 1  -- where the value of `usage` begins, or goes on, in this piece
  while at <= size do
    if s.open then  -- within a string
      local quote = find(text, '"', at, true)
      local stop = quote or size + 1
      local first = stop  -- an odd number of backslashes before a quote escapes it
      while first > at and p[first - 1] == 92 do
        first = first - 1
      end
      local slashes = stop - first + (first == at and s.slashes or 0)
      if depth == 1 and #s.word <= 5 then
        s.word = s.word .. sub(text, at, math.min(stop - 1, at + 6))
      end
      s.slashes = 0
      if not quote then
        s.slashes = slashes
      elseif slashes % 2 == 0 then
        s.open = false
      elseif depth == 1 then
        s.word = s.word .. '"'
      end
      at = stop + 1
    else
      local c = p[at]
      if c == 34 then
        s.open, s.slashes = true, 0
        if depth == 1 then
          s.word = ""
        end
      elseif c == 123 or c == 91 then
        depth = depth + 1
        if depth == 2 and c == 123 and s.colon and s.word == "usage" then
          s.value, from = "", at
        end
      elseif c == 125 or c == 93 then
        depth = depth - 1
        if depth == 1 and from then
          local ok, usage = pcall(cjson.decode, s.value .. sub(text, from, at))
          s.done = true
          if ok then
            note(s, {usage = usage})
          end
          return
        end
      elseif depth == 1 then
        if c == 58 then
          s.colon = true
        elseif c == 44 then
          s.colon = false
        end
      end
      at = at + 1
    end
  end
  s.depth = depth
  if from then
    s.value = s.value .. sub(text, from)
    s.done = #s.value > LONGEST_USAGE
  end
end

-- Read an answer that is here as a whole. The last "usage" in it is most probably the one: what
-- lies between it and the end tells whether it stands at the top level. Returns false where that
-- is not plain to see; then walk() reads it.
local function whole(s, text)
  local from, at = nil, find(text, '"usage"', 1, true)
  if not at then
    return true  -- nor within a string: its quotes would be escaped there
  end
  while at do
    from, at = at, find(text, '"usage"', at + 7, true)
  end
  local p, size = ffi.cast(bytes_of, text) - 1, #text
  at = from + 7
  while at < size and (p[at] <= 32 or p[at] == 58) do  -- a colon, spaces about it
    at = at + 1
  end
  local last = p[at] == 123 and find(text, "}", at, true)
  -- What is no flat object ends too early here, and is no JSON.
  local ok, usage = pcall(cjson.decode, last and sub(text, at, last))
  if not ok then
    return false
  end
  -- After it, only the object that it stands in may end.
  local depth = 1
  at = last + 1
  while at <= size do
    local c = p[at]
    if c == 34 then
      at = find(text, '"', at + 1, true)
      if not at or p[at - 1] == 92 then
        return false
      end
    elseif c == 123 or c == 91 then
      depth = depth + 1
    elseif c == 125 or c == 93 then
      depth = depth - 1
    end
    at = at + 1
  end
  if depth ~= 0 then
    return false
  end
  note(s, {usage = usage})
  return true
end

-- Look at one event of a stream that holds the word "usage". Whether the client must not see it.
local function is_ours(s, event)
  local ok, value = pcall(cjson.decode, event:match("data: ?({.*})%s*$"))
  if not ok or type(value) ~= "table" or not note(s, value) then
    return false
  end
  return s.hide and type(value.choices) == "table" and next(value.choices) == nil
end

-- Position of the last byte of the event that `at` lies in, or nil.
local function event_end(text, at)
  local _, stop = find(text, "\n\n", at, true)
  local _, other = find(text, "\r\n\r\n", at, true)
  return stop and other and math.min(stop, other) or stop or other
end

-- A piece of a stream; returns what of it, and of what was kept back, the client is to get.
local function stream(s, piece, last)
  local kept = s.kept  -- nil, where the last piece ended with an event, as nearly all do
  if kept then
    kept[#kept + 1] = piece
  end
  s.size = s.size + #piece
  -- An event's end may lie across two pieces.
  if not last and not find(piece, "\n\n", 1, true) and not find(s.tail .. piece, "\n\r?\n") then
    kept = kept or {piece}
    s.kept, s.tail = kept, sub(s.tail .. piece, -3)
    if s.hide and s.size <= LONGEST_HIDDEN then
      return ""
    elseif s.size > (s.hide and LONGEST_HIDDEN or LONGEST_READ) then
      s.long = true  -- the rest of this event is not looked into
      local out = s.hide and table.concat(kept)
      s.kept, s.size = nil, 0
      return out or piece
    end
    return piece
  end
  local text = kept and table.concat(kept) or piece
  local at, from, out = 1, 1, nil
  local word = find(text, '"usage"', 1, true)
  while true do
    local stop = event_end(text, at)
    if not stop then
      break
    end
    s.events = s.events + 1
    if word and word <= stop then
      if not s.long and is_ours(s, sub(text, at, stop)) then
        out = (out or "") .. sub(text, from, at - 1)
        from = stop + 1
      end
      word = find(text, '"usage"', stop + 1, true)
    end
    if s.long then
      s.long = nil
    end
    at = stop + 1
  end
  if at > #text then
    s.size, s.tail = 0, ""
    if kept then
      s.kept = nil
    end
  else
    local rest = sub(text, at)
    s.kept, s.size, s.tail = {rest}, #rest, sub(rest, -3)
  end
  if not s.hide then
    return piece
  end
  return (out or "") .. sub(text, from, last and #text or at - 1)
end

-- Header filter of an instance's answer. `hide`: whether usage was asked for by us alone.
-- What is kept has room from the start for all that comes into it.
function M.head(hide)
  local header = ngx.header
  local kind = ngx.status == 200 and header["Content-Type"]
  if not kind or header["Content-Encoding"] then
    return {hide = hide, events = 0}
  elseif find(kind, "text/event-stream", 1, true) then
    if hide then
      header["Content-Length"] = nil
    end
    return {hide = hide, events = 0, read = stream, size = 0, tail = "", prompt = nil,
            completion = nil}
  elseif find(kind, "application/json", 1, true) then
    return {hide = hide, events = 0, read = walk, depth = 0, open = false, slashes = 0, word = "",
            colon = false, length = tonumber(header["Content-Length"]), done = false,
            prompt = nil, completion = nil}
  end
  return {hide = hide, events = 0}
end

-- Body filter: a piece of the answer. Returns what the client is to get of it.
function M.body(s, piece, last)
  if s.read == stream then
    return stream(s, piece, last)
  elseif s.read and not s.done and piece ~= "" then
    if #piece == s.length and whole(s, piece) then
      s.done = true
    else
      walk(s, piece)
    end
  end
  return piece
end

-- What a request cost, at its end: tokens of prompt and answer. `s` is head()'s, nil where no
-- instance answered; `with_instance`, whether one was at work when the client left.
function M.cost(s, status, with_instance, estimate, prompt)
  if not s then
    if status == 499 and with_instance then
      return prompt, estimate - prompt
    end
    return 0, 0
  elseif s.prompt then
    return s.prompt, s.completion
  elseif not s.read and status >= 400 then
    return 0, 0
  elseif s.read == stream then
    return prompt, s.events
  end
  return prompt, estimate - prompt
end

return M
