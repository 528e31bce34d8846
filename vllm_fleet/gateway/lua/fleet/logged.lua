-- The end of every request: the access log's fields, and the request's place in the metrics.

local metrics = require "fleet.metrics"
local utf8 = require "fleet.utf8"

local M = {}

local sound_agent  -- the last one that needed no mending: most clients are of few kinds

-- `request` is the record that the proxy kept, or nil; `instance` the one that had it at the end.
function M.request(request, instance)
  local var = ngx.var
  if not request then
    local path = var.uri
    if path == "/healthz" then
      return  -- asked every other second, by those that watch the gateway
    end
    -- The path of a request that was admitted is one of ours.
    local mended = utf8.mended(path)
    if mended then
      var.fleet_path = mended
    end
  end
  local agent = var.http_user_agent
  if agent ~= sound_agent then
    local mended = utf8.mended(agent)
    if mended then
      var.fleet_agent = mended
    else
      sound_agent = agent
    end
  end
  local began = ngx.req.start_time()
  local first_byte = request and request.header_seconds and request.given
                     and request.given - began + request.header_seconds
  if first_byte then
    var.fleet_ttfb = string.format("%.3f", first_byte)
  end
  local pool, key
  if request then
    pool, key = request.pool, request.key.name
  else
    pool, key = var.fleet_pool, var.fleet_key
  end
  metrics.request(pool ~= "" and pool or "-", instance, key ~= "" and key or "-", ngx.status,
                  first_byte, ngx.now() - began)
end

return M
