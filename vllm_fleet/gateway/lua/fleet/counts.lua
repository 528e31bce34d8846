-- Counters in shared memory, added up in each worker first: a request counts in a dozen places, and
-- shared memory is locked for each of them.
--
-- A worker that is killed takes along what it counted in the last FLUSH seconds, nothing else.
-- There can be MAX_SERIES of them; beyond, or when the memory is full, a new one is not begun.

local store = ngx.shared.fleet_metrics

local M = {}

local FLUSH = 0.2
local MAX_SERIES = 40000

local pending, flushed = {}, false

-- Add to a series at once, and begin it where it is new.
function M.add(series, by)
  local value, err = store:incr(series, by)
  if value or err ~= "not found" then
    return
  end
  local full = (store:get("series") or 0) >= MAX_SERIES
  local ok
  if not full then
    ok, err = store:safe_add(series, by)  -- never at the cost of another series
    if ok then
      store:incr("series", 1, 0)
      return
    elseif err == "exists" then
      store:incr(series, by)  -- another worker was faster
      return
    end
  end
  if store:incr("dropped", 1, 0) == 1 then
    ngx.log(ngx.ERR, "vllm-fleet: more metrics than the gateway keeps (", full and "series" or err,
            "): new ones are left out; see vllm_fleet_gateway_series_dropped_total")
  end
end

-- Add to a series soon.
function M.gather(series, by)
  if not flushed then
    return M.add(series, by)
  end
  pending[series] = (pending[series] or 0) + by
end

-- Bring what this worker gathered to shared memory.
function M.flush()
  local gathered = pending
  pending = {}
  for series, by in pairs(gathered) do
    M.add(series, by)
  end
end

-- In init_worker_by_lua. A worker that retires has no timers any more: what it still has to count
-- goes to shared memory at once.
function M.start()
  flushed = ngx.timer.every(FLUSH, function(premature)
    flushed = not premature
    M.flush()
  end) and true or false
end

return M
