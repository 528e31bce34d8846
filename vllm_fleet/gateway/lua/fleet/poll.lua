-- Ready states known beforehand: every instance is asked GET /fleet/ready about twice a second.
--
-- Every worker's timer goes round all instances, but each question belongs to the worker that gets
-- the claim, a key in shared memory that expires by itself: so a dead worker blocks nothing, and a
-- host that does not answer delays no other. The same rounds look for drain marks of others.

local config = require "fleet.config"
local gauge = require "fleet.gauge"
local pool = require "fleet.pool"

local state = ngx.shared.fleet_state

local M = {}

local TICK = 0.25  -- seconds between rounds
local INTERVAL = 0.4  -- from an answer to the next question, at least
local CONNECT_MS, READ_MS = 1000, 2000
local CLAIM = 6  -- longer than any question can take
-- A server whose one thread reads a long prompt answers late, and is as ready as before: it is
-- given up only when it is silent this many times in a row. A refused connection and a "not
-- ready" count at once.
local SILENT = 3
local SWEEP = 5
local MARKS = 0.4  -- seconds between looks for drain marks that others made

-- Whether the instance says that it is ready, and if not, why; nil where it took the question and
-- said nothing.
local function ask(instance)
  local socket = ngx.socket.tcp()
  socket:settimeouts(CONNECT_MS, READ_MS, READ_MS)
  local ok, err = socket:connect(instance.address, instance.port)
  if not ok then
    return false, "connect: " .. err
  end
  ok, err = socket:send("GET /fleet/ready HTTP/1.1\r\nHost: " .. instance.host
                        .. "\r\nUser-Agent: vllm-fleet-gateway\r\nConnection: close\r\n\r\n")
  if not ok then
    socket:close()
    return false, "send: " .. err
  end
  local line
  line, err = socket:receive("*l")
  socket:close()
  if not line then
    if err == "timeout" then
      return nil, "/fleet/ready: no answer"
    end
    return false, "/fleet/ready: " .. err
  end
  local status = line:match("^HTTP/1%.[01] (%d%d%d)")
  return status == "200", "/fleet/ready answered " .. (status or "no HTTP")
end

local function check(instance)
  local ready, why = ask(instance)
  local silence = "silent:" .. instance.id
  if ready ~= nil then
    state:delete(silence)
    pool.said_ready(instance, ready, why)
  elseif state:incr(silence, 1, 0) >= SILENT then
    pool.said_ready(instance, false, why .. ", " .. SILENT .. " times in a row")
  end
  state:set("claim:" .. instance.id, 1, INTERVAL)
end

local function round(premature)
  if premature then
    return
  end
  for _, each in ipairs(config.pools()) do
    for _, instance in ipairs(each.instances) do
      if state:add("claim:" .. instance.id, 1, CLAIM) then
        ngx.thread.spawn(check, instance)
      end
    end
  end
  if state:add("claim of the marks", 1, MARKS) then
    pool.recall()
  end
  if state:add("claim of the sweep", 1, SWEEP) then
    gauge.sweep()
  end
end

-- In init_worker_by_lua.
function M.start()
  ngx.timer.at(0, round)
  ngx.timer.every(TICK, round)
end

return M
