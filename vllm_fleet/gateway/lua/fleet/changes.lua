-- When what a worker knows from shared memory must be read again.
--
-- Pools, ready states, drain marks and breakers are looked at with every request and change seldom.
-- Workers keep copies of them, and of shared memory read one number, which counts the changes.

local state = ngx.shared.fleet_state

local M = {}

-- Seconds that a copy is used at most: after an upgrade, workers of the release before may still
-- have requests, and count nothing here.
local LONGEST = 0.25

-- Count a change. To be called when it is in shared memory, not before.
function M.happened()
  state:incr("changes", 1, 0)
end

-- A function that says whether copies must be made anew; for one set of copies.
function M.watch()
  local seen, at = nil, -math.huge
  return function()
    local number, age = state:get("changes"), ngx.now() - at
    if number == seen and age >= 0 and age < LONGEST then
      return false
    end
    seen, at = number, ngx.now()
    return true
  end
end

return M
