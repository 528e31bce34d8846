-- The instances of a pool: which are ready, and which one gets the next request.

local gauge = require "fleet.gauge"

local state = ngx.shared.fleet_state

local M = {}

function M.is_ready(instance)
  return state:get("ready:" .. instance.id) == 1
end

-- Book what was learnt of an instance; a change is worth a line in the error log.
function M.set_ready(instance, ready, why)
  local key, value = "ready:" .. instance.id, ready and 1 or 0
  if state:get(key) ~= value then
    state:set(key, value)
    ngx.log(ready and ngx.NOTICE or ngx.ERR, "vllm-fleet: ", instance.id,
            ready and " is ready" or " is not ready: ", ready and "" or why)
  end
end

-- An instance that an operator drains gets no request, however ready it says it is.
function M.is_draining(id)
  return state:get("drain:" .. id) == true
end

-- Both may be said again and again.
function M.drain(id)
  state:set("drain:" .. id, true)
end

function M.undrain(id)
  state:delete("drain:" .. id)
end

-- The ready instance with the fewest requests in flight that is not in `tried` (a set of ids);
-- like ones in turn. nil where there is none.
local turn = 0
function M.pick(pool, tried)
  local instances, best, fewest = pool.instances, nil, nil
  turn = turn + 1
  for i = 1, #instances do
    local instance = instances[(turn + i) % #instances + 1]
    if not tried[instance.id] and M.is_ready(instance) and not M.is_draining(instance.id) then
      local count = gauge.get("flight:" .. instance.id)
      if not best or count < fewest then
        best, fewest = instance, count
      end
    end
  end
  return best
end

return M
