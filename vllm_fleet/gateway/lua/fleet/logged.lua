-- The end of every request: the access log's fields, and the request's place in the metrics.

local metrics = require "fleet.metrics"

local M = {}

local LOST = "\239\191\189"  -- U+FFFD

-- Lengths of UTF-8's characters by first byte, and the least and greatest second byte.
local function length(first, second)
  if first >= 194 and first <= 223 then
    return 2, 128, 191
  elseif first >= 224 and first <= 239 then
    return 3, first == 224 and 160 or 128, first == 237 and 159 or 191
  elseif first >= 240 and first <= 244 then
    return 4, first == 240 and 144 or 128, first == 244 and 143 or 191
  end
  return nil, second
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

-- `request` is the record that the proxy kept, or nil; `instance` the one that had it at the end.
function M.request(request, instance)
  local var = ngx.var
  local path = var.uri
  if path == "/healthz" then
    return  -- asked every other second, by those that watch the gateway
  end
  local mended = M.mended(path)
  if mended then
    var.fleet_path = mended
  end
  mended = M.mended(var.http_user_agent)
  if mended then
    var.fleet_agent = mended
  end
  local began = ngx.req.start_time()
  local first_byte = request and request.header_seconds and request.given
                     and request.given - began + request.header_seconds
  if first_byte then
    var.fleet_ttfb = string.format("%.3f", first_byte)
  end
  local pool, key = var.fleet_pool, var.fleet_key
  metrics.request(pool ~= "" and pool or "-", instance, key ~= "" and key or "-", ngx.status,
                  first_byte, ngx.now() - began)
end

return M
