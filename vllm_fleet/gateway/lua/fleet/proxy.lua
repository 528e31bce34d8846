-- One request's way: admitted, given to an instance, held while there is none, tried elsewhere
-- where that is safe, logged.
--
-- nginx runs admit() as content of the client's location. It jumps to @fleet_proxy, where choose()
-- runs in the access phase, before proxy_pass. When that try ends in 502, 503 or 504, error_page
-- jumps to @fleet_proxy again, and choose() finds the same request with a try behind it. A jump
-- clears ngx.ctx, so a request's state is kept here by nginx's $request_id until the log phase.

local balancer = require "ngx.balancer"

local answer = require "fleet.answer"
local config = require "fleet.config"
local gauge = require "fleet.gauge"
local keys = require "fleet.keys"
local metrics = require "fleet.metrics"
local pools = require "fleet.pool"
local scan = require "fleet.scan"

local M = {}

-- nginx ends a request after ten internal jumps with a 500; one brought it here.
local MAX_TRIES = 9
local FIRST_SLEEP, LONGEST_SLEEP = 0.02, 0.5
local RETRY_AFTER = 5

local live = {}  -- request id -> state, of this worker

-- Text from a client, fit for the log and for a message.
local function plain(text)
  return (text:sub(1, 128):gsub("[^\32-\126]", "?"))
end

-- The body, from memory or from the file that nginx spooled it to; nil and why.
local function body()
  -- Raises for HTTP/2 without a length.
  local ok = pcall(ngx.req.read_body)
  if not ok then
    return nil, "length"
  end
  local data = ngx.req.get_body_data()
  if data then
    return data
  end
  local path = ngx.req.get_body_file()
  if not path then
    return ""
  end
  local file, err = io.open(path, "rb")
  if not file then
    return nil, err
  end
  data = file:read("*a")
  file:close()
  return data
end

local function pool_of(text)
  local kind, name = scan.model(text)
  if kind == "json" then
    return answer.error(400, "The request body is not a JSON object.")
  elseif kind == "type" then
    return answer.error(400, "`model` must be a string.", "model")
  elseif kind == "missing" then
    -- The engine serves its one model then; so does a gateway with one pool.
    local all = config.pools()
    if #all == 1 then
      return all[1]
    end
    return answer.error(400, "`model` is required: this gateway serves several. "
                             .. "GET /v1/models lists them.", "model")
  end
  ngx.var.fleet_model = plain(name)
  local pool = config.pool(name)
  if not pool then
    return answer.error(404, "The model `" .. plain(name) .. "` does not exist.", "model")
  end
  return pool
end

-- Whether path, method and key are in order; answers where not.
function M.allow(method)
  -- The path as sent must be the path that nginx matched: no escapes, no //, no dots.
  if ngx.var.request_uri:match("^[^?]*") ~= ngx.var.uri then
    return answer.error(404, "There is no such path.")
  end
  -- A proxy in front may have taken the other length, and what follows for a request of its own.
  -- nginx from 1.21.1 on refuses this by itself; Ubuntu 22.04 has an older one.
  if ngx.var.http_transfer_encoding and ngx.var.http_content_length then
    return answer.error(400, "The request's length is told in two ways.")
  end
  local asked = ngx.req.get_method()
  if asked ~= method and not (asked == "HEAD" and method == "GET") then
    ngx.header["Allow"] = method
    return answer.error(405, "Only " .. method .. " is allowed here.")
  end
  local name = keys.name()
  if not name then
    ngx.header["WWW-Authenticate"] = "Bearer"
    return answer.error(401, "No API key, or one that this gateway does not know. Send it as "
                             .. "`Authorization: Bearer KEY`.")
  end
  ngx.var.fleet_key = name
  return true
end

-- Content of the client's location.
function M.admit()
  M.allow("POST")
  local text, err = body()
  if not text then
    if err == "length" then
      return answer.error(400, "A request body needs a Content-Length.")
    end
    ngx.log(ngx.ERR, "vllm-fleet: cannot read the request body that nginx spooled: ", err)
    return answer.error(500, "The gateway could not read the request body.")
  end
  local pool = pool_of(text)
  ngx.var.fleet_pool = pool.name
  ngx.var.fleet_upstream = pool.upstream
  live[ngx.var.request_id] = {pool = pool.name, tried = {}, tries = {}, held_ms = 0, rounds = 0}
  return ngx.exec("@fleet_proxy")
end

-- The last of the values that nginx lists for each try.
local function last(list)
  return list and list:match("([^ ,:]+)$")
end

local function leave(request, status)
  local instance = request.instance
  if instance then
    request.instance = nil
    gauge.add("flight:" .. instance.id, -1)
    request.tries[#request.tries + 1] = instance.id .. ":" .. status
  end
end

-- Look at a try that ended in 502, 503 or 504. Returns when another instance may be tried:
-- the connection failed, so nothing was sent, or the gate refused the request unseen.
local function after_try(request)
  local instance = request.instance
  local status = last(ngx.var.upstream_status) or tostring(ngx.status)
  local sent = last(ngx.var.upstream_bytes_sent)
  leave(request, status)
  local reason
  if sent == "0" or sent == nil or sent == "-" then
    reason = "connect"
    pools.set_ready(instance, false, "connecting for a request failed")
  elseif status == "503" and ngx.var.upstream_http_x_fleet_gate then
    reason = "gate"
    pools.set_ready(instance, false, "its gate refused a request")
  end
  if reason then
    request.tried[instance.id] = true
    metrics.count("vllm_fleet_gateway_retries_total",
                  string.format('pool="%s",reason="%s"', request.pool, reason))
    return
  end
  if status == "503" then
    return answer.later("The engine is too busy for this request now.",
                        tonumber(ngx.var.upstream_http_retry_after) or RETRY_AFTER)
  elseif status == "504" then
    return answer.error(504, "The instance took longer to answer than this gateway waits. The "
                             .. "request was not given to another one: it may have been worked on.")
  end
  return answer.error(502, "The instance closed the connection before it answered. The request was "
                           .. "not given to another one: it may have been worked on.")
end

local function refuse(pool, reason, message)
  metrics.count("vllm_fleet_gateway_refused_total",
                string.format('pool="%s",reason="%s"', pool, reason))
  return answer.later(message, RETRY_AFTER)
end

local function unhold(request)
  if request.holding then
    request.holding = nil
    gauge.add("held", -1)
    gauge.add("held:" .. request.pool, -1)
    ngx.update_time()
    request.held_ms = request.held_ms + (ngx.now() - request.since) * 1000
  end
end

-- Wait until the pool has a ready instance, for as long as hold_seconds in all. Returns it, or
-- answers. A client that leaves ends the wait (lua_check_client_abort); log() then books it.
local function hold(request)
  local settings = config.settings()
  if gauge.add("held", 1) > settings.hold_requests then
    gauge.add("held", -1)
    return refuse(request.pool, "full", "No instance of `" .. request.pool .. "` is ready, and as "
                  .. "many requests wait as this gateway holds.")
  end
  gauge.add("held:" .. request.pool, 1)
  request.holding, request.since = true, ngx.now()
  local sleep = FIRST_SLEEP
  local deadline = request.since + settings.hold_seconds - request.held_ms / 1000
  -- All were tried once. From here on each may be tried again, at longer and longer intervals, so
  -- that one that says ready and refuses does not use up the tries within seconds.
  request.tried = {}
  request.rounds = request.rounds + 1
  local earliest = request.since
  if request.rounds > 1 then
    earliest = earliest + 0.25 * 2 ^ request.rounds
  end
  while true do
    local left = deadline - ngx.now()
    -- A sleep of less than nginx's clock tick would be a timer of 0, which nginx runs again and
    -- again within one round of its event loop: the worker would hang.
    if left < 0.002 then
      unhold(request)
      return refuse(request.pool, "time", "No instance of `" .. request.pool .. "` became ready "
                    .. "within " .. settings.hold_seconds .. " seconds.")
    end
    ngx.sleep(math.min(sleep, left))
    sleep = math.min(sleep * 1.5, LONGEST_SLEEP)
    local pool = config.pool(request.pool)
    local instance = pool and ngx.now() >= earliest and pools.pick(pool, request.tried)
    if instance then
      unhold(request)
      return instance
    end
  end
end

-- Access phase of @fleet_proxy: settle which instance gets the request.
function M.choose()
  local request = live[ngx.var.request_id]
  if request.instance then
    after_try(request)
  end
  if #request.tries >= MAX_TRIES then
    return refuse(request.pool, "tries", "No instance of `" .. request.pool
                  .. "` took the request.")
  end
  local pool = config.pool(request.pool)
  if not pool or #pool.instances == 0 then
    return refuse(request.pool, "empty", "`" .. request.pool .. "` has no instance.")
  end
  local instance = pools.pick(pool, request.tried) or hold(request)
  request.instance = instance
  gauge.add("flight:" .. instance.id, 1)
end

-- balancer_by_lua of every pool.
function M.balance()
  local instance = live[ngx.var.request_id].instance
  local ok, err = balancer.set_current_peer(instance.address, instance.port)
  if not ok then
    ngx.log(ngx.ERR, "vllm-fleet: ", instance.id, ": ", err)
    return ngx.exit(502)
  end
end

-- Log phase of every request: give back what it held, count it, and fill the access log's fields.
function M.log()
  local request = live[ngx.var.request_id]
  if request then
    live[ngx.var.request_id] = nil
    unhold(request)
    -- A client that left has 499 here, whatever the instance would have said.
    leave(request, ngx.status == 499 and "499" or last(ngx.var.upstream_status) or ngx.status)
    ngx.var.fleet_tried = table.concat(request.tries, ", ")
    ngx.var.fleet_held_ms = string.format("%.0f", request.held_ms)
    ngx.var.fleet_ttfb = last(ngx.var.upstream_header_time)
  end
  local pool = ngx.var.fleet_pool
  if pool ~= "" then
    metrics.count("vllm_fleet_gateway_requests_total",
                  string.format('pool="%s",code="%d"', pool, ngx.status))
  end
end

return M
