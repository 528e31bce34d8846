-- Requests, failures and tokens a second over the last minute, for people at /status.
--
-- Totals are counted in shared memory; every few seconds one worker, whichever gets the claim,
-- keeps a copy of them. A rate is the difference between now and the oldest copy kept.

local cjson = require "cjson"
local config = require "fleet.config"
local counts = require "fleet.counts"

local state, store = ngx.shared.fleet_state, ngx.shared.fleet_metrics

local M = {}

local EVERY, KEPT = 5, 12  -- seconds between copies, and how many

-- Names of totals, built once.
local function named(prefix)
  return setmetatable({}, {__index = function(keys, name)
    local key = prefix .. name
    keys[name] = key
    return key
  end})
end
local of_instance, of_pool = named("total:requests:i:"), named("total:requests:p:")
local tokens_of_pool = named("total:tokens:p:")

-- A request that has ended, booked for its instance, or for its pool where it got none.
function M.request(pool, instance, status)
  counts.gather(instance and of_instance[instance.id] or of_pool[pool], 1)
  if status >= 500 then
    counts.gather("total:failures:" .. (instance and "i:" .. instance.id or "p:" .. pool), 1)
  end
end

function M.tokens(pool, count)
  counts.gather(tokens_of_pool[pool], count)
end

local function totals()
  local out = {}
  local function read(of)
    out[of] = {
      store:get("total:requests:" .. of) or 0,
      store:get("total:failures:" .. of) or 0,
      store:get("total:tokens:" .. of) or 0,
    }
  end
  for _, pool in ipairs(config.pools()) do
    read("p:" .. pool.name)
    for _, instance in ipairs(pool.instances) do
      read("i:" .. instance.id)
    end
  end
  return out
end

local function keep(premature)
  if premature or not state:add("claim of the rates", 1, EVERY - 0.5) then
    return
  end
  local number = state:incr("rates kept", 1, 0)
  state:set("rates:" .. number % KEPT, cjson.encode({at = ngx.now(), totals = totals()}),
            EVERY * (KEPT + 1))
end

-- In init_worker_by_lua.
function M.start()
  ngx.timer.at(0, keep)
  ngx.timer.every(EVERY, keep)
end

-- A function from "p:POOL" or "i:HOST/NAME" to requests, failures and tokens a second; it gives
-- nil, where nothing was kept yet.
function M.now()
  local oldest
  for slot = 0, KEPT - 1 do
    local text = state:get("rates:" .. slot)
    local kept = text and cjson.decode(text)
    if kept and (not oldest or kept.at < oldest.at) then
      oldest = kept
    end
  end
  local seconds = oldest and ngx.now() - oldest.at or 0
  if seconds < 1 then
    return function() return nil end
  end
  local now = totals()
  return function(of)
    local new, old = now[of] or {0, 0, 0}, oldest.totals[of] or {0, 0, 0}
    local function rate(i)
      return math.max(0, new[i] - old[i]) / seconds
    end
    return rate(1), rate(2), rate(3)
  end
end

return M
