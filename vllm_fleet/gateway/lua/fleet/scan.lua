-- The model that a request body names, found without decoding the body.
--
-- Reads what Python's json.loads would read, as the engine does: the top-level key `model`,
-- wherever it stands, the last one where it stands twice, with escapes in key and value. Nested
-- values are skipped by their brackets and strings by a search for the closing quote, so a body of
-- megabytes costs about as much as one pass of memchr. What is skipped is not validated: the
-- engine refuses a broken body itself, and both sides read a sound one alike.

local cjson = require "cjson"

local byte, find, sub = string.byte, string.find, string.sub

local M = {}

-- Position of the quote that closes the string opened at `open`, or nil.
local function string_end(body, open)
  local from = open + 1
  while true do
    local quote = find(body, '"', from, true)
    if not quote then
      return nil
    end
    local first = quote  -- an odd number of backslashes before a quote escapes it
    while byte(body, first - 1) == 92 do
      first = first - 1
    end
    if (quote - first) % 2 == 0 then
      return quote
    end
    from = quote + 1
  end
end

-- Position of the bracket that closes the one at `open`, or nil.
local function nested_end(body, open)
  local depth, at, size = 0, open, #body
  while at <= size do
    local c = byte(body, at)
    if c == 34 then  -- "
      at = string_end(body, at)
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

-- What `model` the object in `body` names.
-- Returns kind, value: "string", the name · "missing" (no such key, null or "") ·
-- "type" (not a string) · "json" (not one JSON object).
function M.model(body)
  local at = 1
  if sub(body, 1, 3) == "\239\187\191" then  -- a byte order mark, which Python skips too
    at = 4
  end
  at = find(body, "[^ \t\r\n]", at)
  if not at or byte(body, at) ~= 123 then
    return "json"
  end
  local kind, name = "missing", nil
  at = find(body, "[^ \t\r\n]", at + 1)
  if at and byte(body, at) == 125 then
    return find(body, "[^ \t\r\n]", at + 1) and "json" or "missing"
  end
  while at do
    if byte(body, at) ~= 34 then
      return "json"
    end
    local key_end = string_end(body, at)
    if not key_end then
      return "json"
    end
    local is_model = key_end - at >= 6 and key_end - at <= 36  -- at most six bytes a letter
        and string_value(body, at, key_end) == "model"
    at = find(body, "[^ \t\r\n]", key_end + 1)
    if not at or byte(body, at) ~= 58 then  -- :
      return "json"
    end
    at = find(body, "[^ \t\r\n]", at + 1)
    if not at then
      return "json"
    end
    local c = byte(body, at)
    local last
    if c == 34 then
      last = string_end(body, at)
    elseif c == 123 or c == 91 then
      last = nested_end(body, at)
    else
      local _
      _, last = find(body, "^[%w+.-]+", at)
    end
    if not last then
      return "json"
    end
    if is_model then
      if c == 34 then
        -- A value that cannot be decoded names no model: \239\191\189 is U+FFFD.
        kind, name = "string", string_value(body, at, last) or "\239\191\189"
        if name == "" then
          kind, name = "missing", nil
        end
      elseif sub(body, at, last) == "null" then
        kind, name = "missing", nil
      else
        kind, name = "type", nil
      end
    end
    at = find(body, "[^ \t\r\n]", last + 1)
    if not at then
      return "json"
    end
    c = byte(body, at)
    if c == 125 then
      if find(body, "[^ \t\r\n]", at + 1) then
        return "json"
      end
      return kind, name
    elseif c ~= 44 then  -- ,
      return "json"
    end
    at = find(body, "[^ \t\r\n]", at + 1)
  end
  return "json"
end

return M
