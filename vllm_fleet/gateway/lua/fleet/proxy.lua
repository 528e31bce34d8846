-- One request's way: admitted, given to an instance, held while there is none, queued while all are
-- at their limit, tried elsewhere where that is safe, logged.
--
-- nginx runs admit() as content of the client's location. Where an instance can have the request at
-- once, it jumps to @fleet_given, which passes it on; else to @fleet_proxy, where choose() runs in
-- the access phase, before proxy_pass. When a try ends in 502, 503 or 504, error_page jumps to
-- @fleet_proxy (again), and choose() finds the same request with a try behind it. A jump clears
-- ngx.ctx, so a request's state is kept here by an id of our own until the log phase.

local balancer = require "ngx.balancer"
local bit = require "bit"

local answer = require "fleet.answer"
local config = require "fleet.config"
local gauge = require "fleet.gauge"
local keys = require "fleet.keys"
local limits = require "fleet.limits"
local logged = require "fleet.logged"
local metrics = require "fleet.metrics"
local pools = require "fleet.pool"
local queue = require "fleet.queue"
local scan = require "fleet.scan"
local usage = require "fleet.usage"

local find, tohex = string.find, bit.tohex

local M = {}

-- nginx ends a request after ten internal jumps with a 500; one brought it here.
local MAX_TRIES = 9
local FIRST_SLEEP, LONGEST_SLEEP = 0.02, 0.5
local RETRY_AFTER = 5
local CLEAR_UP, CLEAR_UP_KB = 0.2, 100  -- seconds, and how much then

-- The estimate of a prompt's tokens is at most this far below the truth, nearly always.
local SLACK = 1.3
-- Tokens of an image or a sound, whose size is not looked at.
local MEDIUM = 1000
-- Prompts of fewer tokens are computed anew in less time than a wait for the right instance takes.
local LONG_PREFIX = 256
-- Where answers take tokens of their own.
local ANSWERS = {
  ["/v1/chat/completions"] = true, ["/v1/completions"] = true, ["/v1/messages"] = true,
  ["/v1/responses"] = true,
}
-- nginx from 1.21.1 on refuses by itself a request whose length is told in two ways; Ubuntu 22.04
-- has an older one.
local TAKES_TWO_LENGTHS = ngx.config.nginx_version < 1021001

-- Request id -> state, of this worker. It is there for as long as a stream runs, so what only few
-- need (tries, tried, waits) is added when they do: of more than 16 fields Lua makes room for 32.
local live = {}

-- The state of this request; nil where it was not admitted.
local function current()
  return ngx.ctx.request or live[ngx.var.fleet_id]
end

-- Ids of this worker: a beginning by chance, then a number. nginx's own $request_id is made by
-- OpenSSL's generator of keys, which takes as long as all else that is read of a request.
local ids_begin, ids = nil, 0

local function start_ids()
  local file = assert(io.open("/dev/urandom", "rb"))
  ids_begin = file:read(12):gsub(".", function(byte)
    return tohex(byte:byte(), 2)
  end)
  file:close()
end

local function next_id()
  ids = ids + 1
  if ids == 4294967296 then
    start_ids()
    ids = 0
  end
  return ids_begin .. tohex(ids)
end

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

-- The name of the pool that path or header ask for, and the path without it. Clients that cannot
-- set `model` use /pools/NAME/v1/... as their base address, or the header X-Fleet-Pool.
local function pool_asked(uri)
  if uri:byte(2) == 112 then  -- p, no v
    return uri:match("^/pools/([^/]+)(/v1/.+)$")
  end
  return ngx.var.http_x_fleet_pool, uri
end

local function no_such_model(name)
  return answer.error(404, "The model `" .. plain(name) .. "` does not exist.", "model")
end

-- The pool of a request, or answers.
local function pool_of(asked, found)
  if found.kind == "json" then
    return answer.error(400, "The request body is not a JSON object.")
  end
  local named = found.model and config.pool(found.model)
  if found.model then
    ngx.var.fleet_model = named and found.model or plain(found.model)
  end
  if asked then
    return config.pool(asked) or no_such_model(asked)
  elseif found.kind == "type" then
    return answer.error(400, "`model` must be a string.", "model")
  elseif found.kind == "missing" then
    -- The engine serves its one model then; so does a gateway with one pool.
    local all = config.pools()
    if #all == 1 then
      return all[1]
    end
    return answer.error(400, "`model` is required: this gateway serves several. "
                             .. "GET /v1/models lists them.", "model")
  end
  return named or no_such_model(found.model)
end

-- The body as the engine is to see it where path or header chose the pool, and what the scanner
-- finds in it: the engine would refuse a `model` that it does not serve, and where an adapter was
-- asked for, it must be told so.
local function renamed(text, found, pool, asked)
  local wanted = config.is_adapter(pool, asked) and asked
  if found.model and config.pool(found.model) == pool and (not wanted or found.model == wanted) then
    return text, found
  elseif found.model_from and (found.kind ~= "missing" or wanted) then
    text = text:sub(1, found.model_from - 1) .. answer.quote(wanted or pool.name)
        .. text:sub(found.model_to + 1)
  elseif wanted then
    text = text:gsub("{(%s*}?)", function(rest)
      return '{"model":' .. answer.quote(wanted) .. (rest:find("}", 1, true) and "" or ",") .. rest
    end, 1)
  else
    return text, found  -- none: the engine serves its model
  end
  ngx.req.set_body_data(text)
  return text, scan.request(text)
end

-- What affinity goes by, as a number: a header of the client's session, else the beginning of the
-- conversation where it is long enough for the engine's prefix cache to matter; or nil.
local function affinity_of(found)
  local settings = config.settings()
  if settings.affinity == "none" then
    return nil
  end
  for _, variable in ipairs(settings.session_variables) do
    local value = ngx.var[variable]
    if value and value ~= "" then
      return ngx.crc32_long(value)
    end
  end
  if settings.affinity == "prefix" and found.first and found.longest >= LONG_PREFIX then
    return ngx.crc32_long(found.first)
  end
  return nil
end

-- Refuse what no instance of the pool can take, by the number of tokens that any tokenizer would
-- make of it at least.
local function check_length(pool, text, found)
  local longest = pool.max_model_len
  if type(longest) ~= "number" or found.longest <= longest or found.truncates then
    return
  end
  local least = scan.least(text, found)
  if least > longest then
    return answer.error(400, string.format(
      "This model's maximum context length is %d tokens, and the prompt has at least %d. Please "
      .. "shorten it.", longest, least), "messages", "context_length_exceeded")
  end
end

-- The key that a request shows and its path, where path, method and key are in order; answers where
-- not.
function M.allow(method)
  -- The path as sent must be the path that nginx matched: no escapes, no //, no dots.
  local sent = ngx.var.request_uri
  local path = ANSWERS[sent] and sent or ngx.var.uri  -- the usual ones are as nginx matched them
  if sent ~= path and sent:match("^[^?]*") ~= path then
    return answer.error(404, "There is no such path.")
  end
  -- A proxy in front may have taken the other length, and what follows for a request of its own.
  if TAKES_TWO_LENGTHS and ngx.var.http_transfer_encoding and ngx.var.http_content_length then
    return answer.error(400, "The request's length is told in two ways.")
  end
  local asked = ngx.req.get_method()
  if asked ~= method and not (asked == "HEAD" and method == "GET") then
    ngx.header["Allow"] = method
    return answer.error(405, "Only " .. method .. " is allowed here.")
  end
  local key, why, expired = keys.find()
  if not key then
    return keys.refuse(why, expired)
  end
  ngx.var.fleet_key = key.name
  return key, path
end

-- In init_worker_by_lua. What a request left behind would stay for as long as the streams run that
-- began beside it, on a worker that has nothing else to do.
function M.start()
  start_ids()
  collectgarbage()  -- what loading left
  ngx.timer.every(CLEAR_UP, function()
    collectgarbage("step", CLEAR_UP_KB)
  end)
end

-- Content of the client's location. The order is what costs least first, and what is charged last.
function M.admit()
  local key, uri = M.allow("POST")
  local asked, path = pool_asked(uri)
  local text, err = body()
  if not text then
    if err == "length" then
      return answer.error(400, "A request body needs a Content-Length.")
    end
    ngx.log(ngx.ERR, "vllm-fleet: cannot read the request body that nginx spooled: ", err)
    return answer.error(500, "The gateway could not read the request body.")
  end
  local found = scan.request(text)
  local pool = pool_of(asked, found)
  if asked then
    text, found = renamed(text, found, pool, asked)
    ngx.req.set_uri(path)
    ngx.var.fleet_path = path
  end
  ngx.var.fleet_pool = pool.name
  ngx.var.fleet_upstream = pool.upstream
  check_length(pool, text, found)
  local answers = ANSWERS[path] and config.settings().answer_tokens or 0
  if not keys.may_use(key, pool, found.model) then
    return keys.refuse_model(key, pool, found.model)
  end
  local estimate, prompt = usage.estimate(path, found)
  local ok, message, retry_after = limits.admit(key, estimate)
  if not ok then
    return answer.busy(message, retry_after)
  end
  local with_usage = usage.ask(path, found, text)
  if with_usage then
    text = with_usage
    ngx.req.set_body_data(text)
  end
  local id = next_id()
  ngx.var.fleet_id = id
  local request = {
    id = id, pool = pool.name, key = key, estimate = estimate, prompt = prompt,
    hide = with_usage ~= nil, bytes = #text,
    instance = nil, answer = nil, ends = nil, first_byte = nil,  -- room for them from the start
    lora = config.is_adapter(pool, found.model) and found.model or nil,
    need = math.ceil(found.longest * SLACK) + MEDIUM * found.media + (found.max_tokens or answers),
    affinity = affinity_of(found),
  }
  live[id] = request
  request.instance = pools.take(pool, request)
  if request.instance then
    return ngx.exec("@fleet_given")
  end
  return ngx.exec("@fleet_proxy")
end

-- The last of the values that nginx lists for each try.
local function last(list)
  if list and find(list, "[ ,:]") then
    return list:match("([^ ,:]+)$")
  end
  return list
end

local function leave(request, status)
  local instance = request.instance
  if instance then
    request.instance = nil
    pools.give(instance)
    local try = instance.id .. ":" .. status
    if request.tries then
      request.tries[#request.tries + 1] = try
    else
      request.tries = {try}
    end
    queue.freed(request.pool)
  end
end

-- Look at a try that ended in 502, 503 or 504. Returns when another instance may be tried:
-- the connection failed, so nothing was sent, or the gate refused the request unseen.
local function after_try(request)
  local instance = request.instance
  local status = last(ngx.var.upstream_status) or tostring(ngx.status)
  local sent = last(ngx.var.upstream_bytes_sent)
  local reason
  if sent == "0" or sent == nil or sent == "-" then
    reason = "connect"
    pools.set_ready(instance, false, "connecting for a request failed")
    pools.failed(instance, "no connection", request.probe)
  elseif status == "503" and ngx.var.upstream_http_x_fleet_gate then
    reason = "gate"
    pools.set_ready(instance, false, "its gate refused a request")
    pools.failed(instance, "its gate refused", request.probe)
  elseif status == "503" then
    pools.worked(instance)
  else
    pools.failed(instance, "no answer, " .. status, request.probe)
  end
  leave(request, status)
  request.last = instance
  if reason then
    request.tried, request.last = request.tried or {}, nil
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

local function count_refused(pool, reason)
  metrics.count("vllm_fleet_gateway_refused_total",
                string.format('pool="%s",reason="%s"', pool, reason))
end

local function refuse(pool, reason, message)
  count_refused(pool, reason)
  return answer.later(message, RETRY_AFTER)
end

-- Book that a request begins to wait, in hold or queue; answers where the bodies that wait are more
-- than hold_mib.
local function wait_begins(request)
  local limit = config.settings().hold_mib * 1048576
  if gauge.add("waiting bytes", request.bytes) > limit then
    gauge.add("waiting bytes", -request.bytes)
    return refuse(request.pool, "bytes", "No instance of `" .. request.pool .. "` can take this "
                  .. "request now, and the requests that wait are as large as this gateway keeps.")
  end
  request.waiting = true
end

local function wait_ends(request)
  if request.waiting then
    request.waiting = nil
    gauge.add("waiting bytes", -request.bytes)
  end
end

local function unhold(request)
  if request.holding then
    request.holding = nil
    wait_ends(request)
    gauge.add("held", -1)
    gauge.add("held:" .. request.pool, -1)
    ngx.update_time()
    request.held_ms = (request.held_ms or 0) + (ngx.now() - request.since) * 1000
  end
end

-- Wait until the pool has an instance, for as long as hold_seconds in all. Returns it, or nil where
-- the queue is the place to wait now, or answers. A client that leaves ends the wait
-- (lua_check_client_abort); log() then books it.
local function hold(request)
  local settings = config.settings()
  wait_begins(request)
  if gauge.add("held", 1) > settings.hold_requests then
    gauge.add("held", -1)
    wait_ends(request)
    return refuse(request.pool, "full", "No instance of `" .. request.pool .. "` is ready, and as "
                  .. "many requests wait as this gateway holds.")
  end
  gauge.add("held:" .. request.pool, 1)
  request.holding, request.since = true, ngx.now()
  local sleep = FIRST_SLEEP
  local deadline = request.since + settings.hold_seconds - (request.held_ms or 0) / 1000
  -- All were tried once. From here on each may be tried again, at longer and longer intervals, so
  -- that one that says ready and refuses does not use up the tries within seconds.
  request.tried = nil
  request.rounds = (request.rounds or 0) + 1
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
    if pool and ngx.now() >= earliest then
      local instance, why = pools.take(pool, request)
      if instance or why == "full" then
        unhold(request)
        return instance
      end
    end
  end
end

-- Wait for a place at an instance, for as long as queue_seconds in all. Returns when
-- request.instance is set, or where the pool has no instance any more, or answers.
local function wait_in_queue(pool, request)
  local settings = config.settings()
  local seconds, limit = settings.queue_seconds, settings.queue_requests
  if request.rounds then
    -- Held before: it was admitted then. When an instance is back, all of them come at once.
    seconds, limit = math.max(seconds, settings.hold_seconds), math.huge
  end
  wait_begins(request)
  request.class = pools.class(pool, request.need)
  local deadline = ngx.now() + seconds - (request.queued_ms or 0) / 1000
  local _, why = queue.wait(pool, request, deadline, limit)
  wait_ends(request)
  if why == "full" then
    count_refused(pool.name, "queue")
    return answer.busy("Every instance of `" .. pool.name .. "` is at its limit, and as many "
                       .. "requests wait as this gateway queues.", RETRY_AFTER)
  elseif why == "time" then
    count_refused(pool.name, "queue_time")
    return answer.busy("Every instance of `" .. pool.name .. "` was at its limit for "
                       .. seconds .. " seconds.", RETRY_AFTER)
  end
end

-- Access phase of @fleet_proxy: settle which instance gets the request.
function M.choose()
  local request = current()
  if request.instance then
    after_try(request)
  end
  if request.tries and #request.tries >= MAX_TRIES then
    return refuse(request.pool, "tries", "No instance of `" .. request.pool
                  .. "` took the request.")
  end
  while not request.instance do
    local pool = config.pool(request.pool)
    if not pool or #pool.instances == 0 then
      return refuse(request.pool, "empty", "`" .. request.pool .. "` has no instance.")
    end
    local instance, why = pools.take(pool, request)
    if instance then
      request.instance = instance
    elseif why == "full" then
      wait_in_queue(pool, request)
    else
      request.instance = hold(request)
    end
  end
end

-- balancer_by_lua of every pool.
function M.balance()
  local request = live[ngx.var.fleet_id]
  ngx.ctx = {request = request}
  local instance = request.instance
  local ok, err = balancer.set_current_peer(instance.address, instance.port)
  if not ok then
    ngx.log(ngx.ERR, "vllm-fleet: ", instance.id, ": ", err)
    return ngx.exit(502)
  end
end

-- Header filter of @fleet_proxy: the instance answered. Tries that end in 502, 503 or 504 do not
-- come here: see after_try().
function M.answered()
  local request = current()
  if request and request.instance then
    pools.worked(request.instance)
    request.answer = usage.head(request.hide)
    local now = ngx.now()
    request.first_byte = now - ngx.req.start_time()
    request.ends = now + config.settings().longest_answer
  end
end

-- Body filter of @fleet_proxy: a piece of the answer.
function M.piece()
  local request = ngx.ctx.request
  if not request or not request.ends then
    return
  end
  if ngx.now() > request.ends then
    -- A client that takes the answer drop by drop must not keep the engine's work for ever.
    ngx.log(ngx.ERR, "vllm-fleet: ", request.instance.id, ": an answer took longer than "
            .. "gateway.longest_answer and was cut off")
    return ngx.ERROR
  end
  local piece = ngx.arg[1]
  local out = usage.body(request.answer, piece, ngx.arg[2])
  if out ~= piece then
    ngx.arg[1] = out
  end
end

-- An admitted request has ended: settle what it cost.
local function book(request)
  local key = request.key
  local prompt, completion = usage.cost(request.answer, ngx.status, request.instance ~= nil,
                                        request.estimate, request.prompt)
  limits.settle(key, request.estimate, prompt + completion)
  if prompt + completion > 0 then
    metrics.tokens(request.pool, key.name, prompt, completion)
  end
  ngx.var.fleet_prompt_tokens, ngx.var.fleet_completion_tokens = prompt, completion
end

-- Log phase of every request: give back what it held, count it, and fill the access log's fields.
function M.log()
  local request, instance = current(), nil
  if request then
    live[request.id] = nil
    unhold(request)
    queue.leave(request)
    wait_ends(request)
    instance = request.instance or request.last
    book(request)
    -- A client that left has 499 here, whatever the instance would have said.
    local status = ngx.status
    if status ~= 499 and not request.answer then
      status = last(ngx.var.upstream_status) or status
    end
    leave(request, status)
    local tries = request.tries
    if tries then
      ngx.var.fleet_tried = #tries == 1 and tries[1] or table.concat(tries, ", ")
    end
    if request.held_ms or request.queued_ms then
      ngx.var.fleet_held_ms = string.format("%.0f", request.held_ms or 0)
      ngx.var.fleet_queued_ms = string.format("%.0f", request.queued_ms or 0)
    end
  end
  logged.request(request, instance)
end

return M
