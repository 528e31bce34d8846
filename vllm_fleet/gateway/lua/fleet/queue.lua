-- Requests that wait because every instance of their pool is at its limit.
--
-- Who is next is settled by tags, as in fair queueing: a request gets the number after its owner's
-- last one, but none that has long been passed, and the smallest number goes first. So owners take
-- turns, however many requests each of them sends, and one alone may use everything.
--
-- Each class of context lengths has a queue of its own. Who may use larger instances too leaves
-- them to those who need them, see pool.take().
--
-- Requests wait in the worker that has them, each on a semaphore of its own. Only the first of each
-- worker looks for a place now and then; it also wakes those behind it. Workers agree on who is
-- first through shared memory:
--   q at:NAME          tag of the last request that got a place
--   q tag:NAME:OWNER   the owner's last tag
--   q first:NAME       the smallest tag that waits, and the worker's pid; expires by itself
-- There are no timers in this: a worker that ends after a reload runs none, and may hold requests.

local semaphore = require "ngx.semaphore"

local config = require "fleet.config"
local gauge = require "fleet.gauge"
local pools = require "fleet.pool"

local state = ngx.shared.fleet_state

local M = {}

local STEP, LONG_STEP = 0.01, 0.5  -- seconds between looks of the first, of all others
local FORGET = 600  -- seconds after which an owner's last tag is forgotten
local CLAIM = 0.1  -- seconds that a word of the first one holds: longer than its steps
local BURST = 2  -- how far a worker goes beyond the tag that others know of

local queues = {}  -- pool -> list of queues, one for each class and adapter

local function queue_of(pool, request)
  local name = pools.queue_name(pool, request.class) .. ":" .. (request.lora or "")
  local list = queues[pool.name] or {}
  queues[pool.name] = list
  for _, queue in ipairs(list) do
    if queue.name == name then
      return queue
    end
  end
  local queue = {name = name, class = request.class, pool = pool.name}
  list[#list + 1] = queue
  return queue
end

local function next_tag(queue, owner)
  local passed = state:get("q at:" .. queue.name) or 0
  local key = "q tag:" .. queue.name .. ":" .. owner
  local tag = state:incr(key, 1, passed, FORGET)
  if tag <= passed then
    tag = passed + 1
    state:set(key, tag, FORGET)
  end
  return tag
end

local function insert(queue, waiter)
  local at = #queue + 1
  while at > 1 and queue[at - 1].tag > waiter.tag do
    at = at - 1
  end
  table.insert(queue, at, waiter)
end

local function remove(queue, waiter)
  for at, each in ipairs(queue) do
    if each == waiter then
      table.remove(queue, at)
      return at
    end
  end
end

-- Whether no other worker has a request that comes before this tag; tells them of it.
local function is_first(queue, tag)
  local key, pid = "q first:" .. queue.name, ngx.worker.pid()
  local told = state:get(key)
  if told then
    local other, whose = told:match("^(%S+) (%d+)$")
    if tonumber(whose) ~= pid and tonumber(other) < tag then
      return false
    end
  end
  state:set(key, string.format("%.0f %d", tag, pid), CLAIM)
  return true
end

-- Give places to those who are next, as long as there are any.
local function serve(queue)
  local began
  while queue[1] do
    local waiter = queue[1]
    local pool = config.pool(queue.pool)
    if not began or waiter.tag >= began + BURST then
      if not is_first(queue, waiter.tag) then
        return
      end
      began = waiter.tag
    end
    local instance, why
    if pool then
      instance, why = pools.take(pool, waiter.request, true)
    end
    if not instance then
      if why ~= "full" then
        waiter.gone = true  -- there is no instance to wait for
        waiter.wake:post()
      end
      return
    end
    table.remove(queue, 1)
    -- Booked at once: a client that leaves before its request wakes up gives it back.
    waiter.request.instance, waiter.done = instance, true
    if waiter.tag > (state:get("q at:" .. queue.name) or 0) then
      state:set("q at:" .. queue.name, waiter.tag)
    end
    waiter.wake:post()
  end
  state:delete("q first:" .. queue.name)
end

-- Book that a place of this pool may be free.
function M.freed(pool_name)
  local list = queues[pool_name]
  for i = 1, list and #list or 0 do
    if list[i][1] then
      serve(list[i])
    end
  end
end

-- Take a request out: it was served, its time is up, or its client left.
function M.leave(request)
  local waiter = request.waiter
  if not waiter then
    return
  end
  request.waiter = nil
  gauge.add("queued:" .. waiter.queue.pool, -1)
  gauge.add(waiter.gauge, -1)
  if not waiter.done and remove(waiter.queue, waiter) == 1 and waiter.queue[1] then
    waiter.queue[1].wake:post()  -- who looks out for places from now on
  end
  ngx.update_time()
  request.queued_ms = (request.queued_ms or 0) + (ngx.now() - waiter.since) * 1000
end

-- Wait for a place until `deadline`. Returns true when request.instance is set; else nil and
-- "full" (too many wait: `limit`), "time", or "none" (the pool has no instance any more).
function M.wait(pool, request, deadline, limit)
  if gauge.add("queued:" .. pool.name, 1) > limit then
    gauge.add("queued:" .. pool.name, -1)
    return nil, "full"
  end
  local queue = queue_of(pool, request)
  -- One that waited before keeps its place in the order.
  request.tag = request.tag or next_tag(queue, request.key.name)
  local waiter = {request = request, queue = queue, tag = request.tag, since = ngx.now(),
                  wake = semaphore.new(0), gauge = pools.queue_name(pool, request.class)}
  request.waiter = waiter
  gauge.add(waiter.gauge, 1)
  insert(queue, waiter)
  local why
  while true do
    if queue[1] == waiter then
      serve(queue)
    end
    if waiter.done then
      break
    elseif waiter.gone then
      why = "none"
      break
    end
    local left = deadline - ngx.now()
    if left < 0.002 then  -- a wait of less than nginx's clock tick would be none
      why = "time"
      break
    end
    waiter.wake:wait(math.min(queue[1] == waiter and STEP or LONG_STEP, left))
  end
  M.leave(request)
  if queue[1] then
    queue[1].wake:post()
  end
  return waiter.done, why
end

return M
