-- Text that a client sent, made valid UTF-8: what is written as JSON must be.

local M = {}

local LOST = "\239\191\189"  -- U+FFFD

-- Length of the character that begins with this byte, and the least and greatest second byte; nil
-- where none does.
local function length(first)
  if first >= 194 and first <= 223 then
    return 2, 128, 191
  elseif first >= 224 and first <= 239 then
    return 3, first == 224 and 160 or 128, first == 237 and 159 or 191
  elseif first >= 240 and first <= 244 then
    return 4, first == 240 and 144 or 128, first == 244 and 143 or 191
  end
  return nil
end

-- Text with every byte that is no part of valid UTF-8 replaced; nil where nothing had to be.
-- nginx escapes control characters, quotes and backslashes for JSON, and passes on the rest.
function M.mended(text)
  if not text or not text:find("[\128-\255]") then
    return nil
  end
  local out, at, changed = {}, 1, false
  while at <= #text do
    local first = text:byte(at)
    local size, least, most = length(first)
    if first < 128 then
      size = 1
    elseif size then
      local second = text:byte(at + 1)
      if not second or second < least or second > most
          or #text:match("^[\128-\191]*", at + 1) < size - 1 then
        size = nil
      end
    end
    if size then
      out[#out + 1] = text:sub(at, at + size - 1)
    else
      out[#out + 1], size, changed = LOST, 1, true
    end
    at = at + size
  end
  return changed and table.concat(out) or nil
end

return M
