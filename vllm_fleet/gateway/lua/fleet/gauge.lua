-- Counts of what is going on now (requests in flight, requests held), over all workers.
--
-- Each change is booked twice: under the name, which is what is read, and under the worker's pid,
-- so that what a killed worker had open can be taken off again. Both live in shared memory and so
-- survive reloads; a worker that ends in good order has brought its own counts back to 0.

local ffi = require "ffi"

pcall(ffi.cdef, "int kill(int pid, int sig);")

local state = ngx.shared.fleet_state

local M = {}

-- Keys in shared memory by name, built once: names are of what was deployed. A worker begins with
-- what the master had, so its own part is built for its pid.
local of_all = setmetatable({}, {__index = function(keys, name)
  local key = "g:" .. name
  keys[name] = key
  return key
end})
local of_worker, pid = {}, nil

local function key_of_worker(name)
  if pid ~= ngx.worker.pid() then
    pid, of_worker = ngx.worker.pid(), {}
  end
  local key = of_worker[name]
  if not key then
    key = "w:" .. pid .. ":" .. name
    of_worker[name] = key
  end
  return key
end

function M.add(name, delta)
  state:incr(key_of_worker(name), delta, 0)
  return state:incr(of_all[name], delta, 0)
end

function M.get(name)
  local value = state:get(of_all[name]) or 0
  return value > 0 and value or 0
end

-- Take off what dead workers left behind. Any worker may run it; two at once may not, see poll.
function M.sweep()
  for _, key in ipairs(state:get_keys(0)) do
    local whose, name = key:match("^w:(%d+):(.+)$")
    if whose and ffi.C.kill(tonumber(whose), 0) ~= 0 then
      local left = state:get(key) or 0
      state:delete(key)
      if left ~= 0 then
        state:incr("g:" .. name, -left, 0)
        ngx.log(ngx.ERR, "vllm-fleet: worker ", whose, " died with ", name, " at ", left,
                "; taken off the count")
      end
    end
  end
end

return M
