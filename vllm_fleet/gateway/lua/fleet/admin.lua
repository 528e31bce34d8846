-- What the gateway says of itself: /v1/models, /healthz, /status, /metrics; and what an operator
-- may tell it: /drain and /undrain.

local answer = require "fleet.answer"
local config = require "fleet.config"
local keys = require "fleet.keys"
local metrics = require "fleet.metrics"
local near = require "fleet.near"
local page = require "fleet.page"
local pools = require "fleet.pool"
local proxy = require "fleet.proxy"
local status = require "fleet.status"

local M = {}

local quote = answer.quote

local function model(name, pool)
  return string.format(
    '{"id":%s,"object":"model","created":0,"owned_by":"vllm-fleet","root":%s,"parent":%s,'
    .. '"max_model_len":%s}', quote(name), quote(pool.name),
    config.is_adapter(pool, name) and quote(pool.name) or "null",
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
    for _, adapter in ipairs(pool.loras) do
      out[#out + 1] = model(adapter, pool)
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

-- GET /status: a page for browsers, JSON for programs.
function M.status()
  ngx.header["Cache-Control"] = "no-store"
  ngx.header["Vary"] = "Accept"
  local all = status.gather()
  if (ngx.var.http_accept or ""):find("text/html", 1, true) then
    local nonce = ngx.var.request_id  -- of nginx's own, random; never the client's
    return answer.page(page.html(all, nonce), nonce)
  end
  return answer.json(200, status.json(all))
end

-- Every instance by its id, HOST/NAME, and the ids in declared order.
local function instances()
  local by_id, ids = {}, {}
  for _, pool in ipairs(config.pools()) do
    for _, instance in ipairs(pool.instances) do
      by_id[instance.id] = instance
      ids[#ids + 1] = instance.id
    end
  end
  return by_id, ids
end

local function drain_state(instance)
  return string.format('{"instance":%s,"draining":%s,"ready":%s,"in_flight":%d}',
                       quote(instance.id), tostring(pools.is_draining(instance.id)),
                       tostring(pools.is_ready(instance)), pools.in_flight(instance))
end

-- The instance that the request names, or an answer of what is wrong.
local function named(by_id, ids)
  local id = ngx.req.get_uri_args(10).instance
  if type(id) ~= "string" or id == "" then
    return answer.error(400, "Name one instance: ?instance=HOST/NAME.", "instance")
  end
  local instance = by_id[id]
  if not instance then
    local hints = near.nearest(id, ids, 3)
    local shown = id:sub(1, 128):gsub("[^\32-\126]", "?")
    return answer.error(404, "There is no instance `" .. shown .. "`."
      .. (#hints > 0 and " Near it: " .. table.concat(hints, ", ") .. "." or ""), "instance")
  end
  return instance
end

-- Only asked by hand or by a program: a page that an operator happens to look at may not.
local function refuse_pages()
  if ngx.var.http_origin or (ngx.var.http_sec_fetch_site or "none") ~= "none" then
    return answer.error(403, "Browsers' scripts may not drain instances; use curl.")
  end
end

local function allow(...)
  local method = ngx.req.get_method()
  for _, allowed in ipairs({...}) do
    if method == allowed then
      return method
    end
  end
  ngx.header["Allow"] = table.concat({...}, ", ")
  return answer.error(405, "Only " .. table.concat({...}, " and ") .. " is allowed here.")
end

-- POST /drain?instance=HOST/NAME: no new request goes there; those in flight end. It may be said
-- again and again: the answer has in_flight, 0 when nothing is left.
-- GET /drain: every instance that is drained, or the named one.
function M.drain()
  local method = allow("GET", "POST")
  ngx.header["Cache-Control"] = "no-store"
  local by_id, ids = instances()
  if method == "POST" then
    refuse_pages()
    local instance = named(by_id, ids)
    if not pools.is_draining(instance.id) then
      local _, why = pools.drain(instance.id)
      if why then
        return answer.error(500, instance.id .. " was not drained: " .. why .. ".")
      end
      ngx.log(ngx.NOTICE, "vllm-fleet: ", instance.id, " is drained, asked by ",
              ngx.var.remote_addr)
    end
    return answer.json(200, drain_state(instance))
  elseif ngx.var.arg_instance then
    return answer.json(200, drain_state(named(by_id, ids)))
  end
  local drained = {}
  for _, id in ipairs(ids) do
    if pools.is_draining(id) then
      drained[#drained + 1] = drain_state(by_id[id])
    end
  end
  return answer.json(200, '{"instances":[' .. table.concat(drained, ",") .. "]}")
end

-- POST /undrain?instance=HOST/NAME: it gets requests again as soon as it is ready.
function M.undrain()
  allow("POST")
  refuse_pages()
  local instance = named(instances())
  if pools.is_draining(instance.id) then
    local _, why = pools.undrain(instance.id)
    if why then
      return answer.error(500, instance.id .. " is drained still: " .. why .. ".")
    end
    ngx.log(ngx.NOTICE, "vllm-fleet: ", instance.id, " is drained no more, asked by ",
            ngx.var.remote_addr)
  end
  return answer.json(200, drain_state(instance))
end

function M.metrics()
  ngx.header["Content-Type"] = "text/plain; version=0.0.4; charset=utf-8"
  ngx.print(metrics.text())
  return ngx.exit(ngx.HTTP_OK)
end

return M
