-- What the gateway says of itself: /v1/models, /healthz, /status, /metrics.

local answer = require "fleet.answer"
local config = require "fleet.config"
local gauge = require "fleet.gauge"
local keys = require "fleet.keys"
local metrics = require "fleet.metrics"
local pools = require "fleet.pool"
local proxy = require "fleet.proxy"

local M = {}

local quote = answer.quote

local function array(list, item)
  local out = {}
  for i, value in ipairs(list) do
    out[i] = item(value)
  end
  return "[" .. table.concat(out, ",") .. "]"
end

local function model(name, pool)
  return string.format(
    '{"id":%s,"object":"model","created":0,"owned_by":"vllm-fleet","root":%s,"parent":null,'
    .. '"max_model_len":%s}', quote(name), quote(pool.name),
    type(pool.max_model_len) == "number" and string.format("%d", pool.max_model_len) or "null")
end

-- GET /v1/models: every name that the client's key is for; from what was deployed, not from who is
-- up.
function M.models()
  local key = proxy.allow("GET")
  local out = {}
  for _, pool in ipairs(config.pools()) do
    if keys.may_use(key, pool) then
      out[#out + 1] = model(pool.name, pool)
      for _, alias in ipairs(pool.aliases) do
        out[#out + 1] = model(alias, pool)
      end
    end
  end
  return answer.json(200, '{"object":"list","data":[' .. table.concat(out, ",") .. "]}")
end

-- GET /v1/models/{id}
function M.model()
  local key = proxy.allow("GET")
  local name = ngx.var.uri:match("^/v1/models/(.+)$")
  local pool = config.pool(name)
  if not pool then
    return answer.error(404, "The model `" .. name:sub(1, 128) .. "` does not exist.", "model")
  end
  if not keys.may_use(key, pool, name) then
    return keys.refuse_model(key, pool, name)
  end
  return answer.json(200, model(name, pool))
end

-- Whether the gateway itself works; instances are /status's matter.
function M.healthz()
  return answer.json(200, '{"status":"ok"}')
end

function M.status()
  local settings = config.settings()
  return answer.json(200, string.format(
    '{"held":%d,"hold_requests":%d,"hold_seconds":%d,"pools":%s}', gauge.get("held"),
    settings.hold_requests, settings.hold_seconds, array(config.pools(), function(pool)
      return string.format('{"name":%s,"aliases":%s,"held":%d,"instances":%s}', quote(pool.name),
        array(pool.aliases, quote), gauge.get("held:" .. pool.name),
        array(pool.instances, function(instance)
          return string.format(
            '{"host":%s,"name":%s,"address":%s,"port":%d,"ready":%s,"in_flight":%d}',
            quote(instance.host), quote(instance.name), quote(instance.address), instance.port,
            tostring(pools.is_ready(instance)), gauge.get("flight:" .. instance.id))
        end))
    end)))
end

function M.metrics()
  ngx.header["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
  ngx.print(metrics.text())
  return ngx.exit(ngx.HTTP_OK)
end

return M
