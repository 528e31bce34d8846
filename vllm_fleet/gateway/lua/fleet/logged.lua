-- The end of every request: the access log's fields, and the request's place in the metrics.

local metrics = require "fleet.metrics"
local utf8 = require "fleet.utf8"

local M = {}

local sound_agent  -- the last one that needed no mending: most clients are of few kinds

-- What nginx refused by itself: some of it before the server's `set` gave the fields of the log
-- what they begin with.
local function refused(var)
  local path = var.uri or ""
  var.fleet_path = path == "/fleet/refused" and "" or utf8.mended(path) or path
  if (var.fleet_ttfb or "") == "" then
    var.fleet_held_ms, var.fleet_queued_ms, var.fleet_ttfb = 0, 0, "null"
    var.fleet_prompt_tokens, var.fleet_completion_tokens = 0, 0
    var.fleet_agent = var.http_user_agent or ""
  end
end

-- `request` is the record that the proxy kept, or nil; `instance` the one that had it at the end.
function M.request(request, instance)
  local var = ngx.var
  if not request then
    if var.uri == "/healthz" then
      return  -- asked every other second, by those that watch the gateway
    end
    -- The path of a request that was admitted is one of ours.
    refused(var)
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
  local first_byte = request and request.first_byte
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
