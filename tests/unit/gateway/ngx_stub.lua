-- As much of nginx as pool.lua and queue.lua need, in virtual time, for several workers that share
-- memory. Tests spawn coroutines in workers; run() lets them go on until nothing more happens.

local M = {now = 1000, logged = {}}

local workers, waiting, current = {}, {}, nil

local function dict()
  local values, ends = {}, {}
  local function alive(key)
    if ends[key] and ends[key] <= M.now then
      values[key], ends[key] = nil, nil
    end
    return values[key]
  end
  return {
    get = function(_, key) return alive(key) end,
    set = function(_, key, value, ttl)
      values[key], ends[key] = value, ttl and M.now + ttl or nil
      return true
    end,
    add = function(self, key, value, ttl)
      if alive(key) ~= nil then
        return false, "exists"
      end
      return self:set(key, value, ttl)
    end,
    delete = function(_, key) values[key] = nil end,
    incr = function(self, key, delta, init, ttl)
      if alive(key) == nil then
        self:set(key, init, ttl)
      end
      values[key] = values[key] + delta
      return values[key]
    end,
    get_keys = function()
      local keys = {}
      for key in pairs(values) do
        keys[#keys + 1] = key
      end
      return keys
    end,
  }
end

local function crc32(text)
  local crc = 0xFFFFFFFF
  for i = 1, #text do
    crc = bit.bxor(crc, text:byte(i))
    for _ = 1, 8 do
      crc = bit.bxor(bit.rshift(crc, 1), bit.band(crc, 1) ~= 0 and 0xEDB88320 or 0)
    end
  end
  return bit.bnot(crc) % 4294967296
end

-- Forget everything; `pools` is what config.pools() says.
function M.reset(pools)
  M.now, M.logged, workers, waiting, current = 1000, {}, {}, {}, nil
  M.pools = pools
  _G.ngx = {
    shared = {fleet_state = dict()},
    now = function() return M.now end,
    update_time = function() end,
    utctime = function() return "2026-01-01 00:00:00" end,
    crc32_long = crc32,
    worker = {pid = function() return current end},
    NOTICE = 6, ERR = 4,
    log = function(_, ...)
      M.logged[#M.logged + 1] = table.concat({...})
    end,
  }
end

-- The modules of one worker.
function M.worker(pid)
  if not workers[pid] then
    for _, name in ipairs({"fleet.pool", "fleet.queue", "fleet.gauge", "fleet.config"}) do
      package.loaded[name] = nil
    end
    package.loaded["fleet.config"] = {
      pools = function() return M.pools end,
      pool = function(name)
        for _, pool in ipairs(M.pools) do
          if pool.name == name then
            return pool
          end
        end
      end,
    }
    package.loaded["ngx.semaphore"] = {
      new = function(count)
        local semaphore = {count = count}
        function semaphore:post()
          self.count = self.count + 1
        end
        function semaphore:wait(timeout)
          coroutine.yield(M.now + timeout, self)
          if self.count > 0 then
            self.count = self.count - 1
            return true
          end
          return nil, "timeout"
        end
        return semaphore
      end,
    }
    current = pid
    workers[pid] = {pool = require "fleet.pool", queue = require "fleet.queue",
                    gauge = require "fleet.gauge"}
  end
  return workers[pid]
end

-- Call a function in a worker, at once.
function M.call(pid, code, ...)
  local modules = M.worker(pid)
  local before = current
  current = pid
  local a, b, c = code(modules, ...)
  current = before
  return a, b, c
end

local function step(task)
  current = task.pid
  local ok, deadline, semaphore = coroutine.resume(task.thread, M.worker(task.pid))
  assert(ok, deadline)
  if coroutine.status(task.thread) ~= "dead" then
    task.deadline, task.semaphore = deadline, semaphore
    waiting[#waiting + 1] = task
  end
end

-- Run a function in a worker, until its first wait; returns what kill() takes.
function M.spawn(pid, code)
  local task = {pid = pid, thread = coroutine.create(code)}
  step(task)
  return task
end

-- As nginx does when a client leaves.
function M.kill(task)
  for i, each in ipairs(waiting) do
    if each == task then
      table.remove(waiting, i)
    end
  end
end

function M.sleep(seconds)
  coroutine.yield(M.now + seconds, {count = 0})
end

-- Go on until this many seconds have passed.
function M.run(seconds)
  local stop = M.now + seconds
  while true do
    local first
    for i, task in ipairs(waiting) do
      if task.semaphore.count > 0 then
        first = i
        break
      elseif not first or task.deadline < waiting[first].deadline then
        first = i
      end
    end
    local task = waiting[first]
    if not task or task.semaphore.count == 0 and task.deadline > stop then
      M.now = stop
      return
    end
    table.remove(waiting, first)
    if task.semaphore.count == 0 then
      M.now = math.max(M.now, task.deadline)
    end
    step(task)
  end
end

return M
