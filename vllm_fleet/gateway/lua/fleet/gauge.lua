-- Counts of what is going on now (requests in flight, requests held), over all workers.
--
-- Each change is booked twice: under the name, which is what is read, and under the worker's pid,
-- so that what a killed worker had open can be taken off again. Both live in shared memory and so
-- survive reloads; a worker that ends in good order has brought its own counts back to 0.

local ffi = require "ffi"

pcall(ffi.cdef, "int kill(int pid, int sig);")

local state = ngx.shared.fleet_state

local M = {}

function M.add(name, delta)
  state:incr("w:" .. ngx.worker.pid() .. ":" .. name, delta, 0)
  return state:incr("g:" .. name, delta, 0)
end

function M.get(name)
  local value = state:get("g:" .. name) or 0
  return value > 0 and value or 0
end

-- Take off what dead workers left behind. Any worker may run it; two at once may not, see poll.
function M.sweep()
  for _, key in ipairs(state:get_keys(0)) do
    local pid, name = key:match("^w:(%d+):(.+)$")
    if pid and ffi.C.kill(tonumber(pid), 0) ~= 0 then
      local left = state:get(key) or 0
      state:delete(key)
      if left ~= 0 then
        state:incr("g:" .. name, -left, 0)
        ngx.log(ngx.ERR, "vllm-fleet: worker ", pid, " died with ", name, " at ", left,
                "; taken off the count")
      end
    end
  end
end

return M
