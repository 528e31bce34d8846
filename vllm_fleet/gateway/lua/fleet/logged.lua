-- The end of every request: the access log's fields, and the request's place in the metrics.

local metrics = require "fleet.metrics"
local utf8 = require "fleet.utf8"

local M = {}

-- `request` is the record that the proxy kept, or nil; `instance` the one that had it at the end.
function M.request(request, instance)
  local var = ngx.var
  local path = var.uri
  if path == "/healthz" then
    return  -- asked every other second, by those that watch the gateway
  end
  local mended = utf8.mended(path)
  if mended then
    var.fleet_path = mended
  end
  mended = utf8.mended(var.http_user_agent)
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
