-- What a key may ask for: requests a minute, tokens a minute, requests at once; over all workers.
--
-- Each limit a minute is a bucket that holds a minute's worth and fills steadily. What is kept, in
-- shared memory, is the time at which it will be full again: a charge moves that time on, and it
-- may be at most a minute ahead. So nothing has to refill it, a dead worker leaves nothing behind
-- that time does not mend, and a changed limit holds at once.
--
-- Tokens are charged as estimated when a request is admitted, and settled when it has ended; so a
-- bucket may be owed more than it holds, and then stays shut until that is paid back.

local gauge = require "fleet.gauge"
local metrics = require "fleet.metrics"

local state = ngx.shared.fleet_state

local M = {}

local MINUTE = 60
local CRUMB = 0.0001  -- seconds: what rounding of many small charges may add up to
local CLAIM = 5  -- seconds, far longer than it is ever held
local SPINS = 1000

-- Times count from here: added to seconds since 1970, small charges would be rounded away.
state:add("origin of limits", ngx.now())
local origin = state:get("origin of limits")

local function clock()
  return ngx.now() - origin
end

local function account(key, what)
  return "owed:" .. what .. ":" .. key.name
end

-- Move a time that has gone by on to now. One worker does it, the others wait the microsecond that
-- it takes: a charge that fell in between would be lost.
local function forgive(name, now)
  if (state:get(name) or now) >= now then
    return
  end
  local claim = name .. ":claim"
  if state:add(claim, 1, CLAIM) then
    local full_at = state:get(name) or now
    if full_at < now then
      state:incr(name, now - full_at, now)
    end
    state:delete(claim)
    return
  end
  for _ = 1, SPINS do
    if not state:get(claim) then
      return
    end
  end
end

-- Charge so many of what the key may have `limit` of in a minute. Returns nil, or, where it does
-- not fit and nothing was charged, the seconds until it will.
local function charge(key, what, limit, count)
  local now, name, seconds = clock(), account(key, what), count * MINUTE / limit
  forgive(name, now)
  local owed = state:incr(name, seconds, now) - now
  if owed > MINUTE + CRUMB then
    state:incr(name, -seconds, now)
    return owed - MINUTE
  end
end

local function undo(key, what, limit, count)
  state:incr(account(key, what), -count * MINUTE / limit, clock())
end

-- The headers that OpenAI's clients know. A bucket's level is told as it is after this request.
local function tell(key, what, limit)
  local owed = math.max((state:get(account(key, what)) or 0) - clock(), 0)
  local header = ngx.header
  header["x-ratelimit-limit-" .. what] = limit
  header["x-ratelimit-remaining-" .. what] =
    math.max(math.floor((MINUTE - owed + CRUMB) * limit / MINUTE), 0)
  header["x-ratelimit-reset-" .. what] = string.format("%.3fs", owed)
end

local function refused(key, what, message, retry_after)
  metrics.count("vllm_fleet_gateway_limited_total",
                string.format('key="%s",limit="%s"', metrics.escape(key.name), what))
  return nil, message, retry_after
end

local function wait_text(key, limit, what, wait)
  wait = math.max(math.ceil(wait), 1)
  return string.format("The API key of %s has %d %s a minute and has used them up. Try again in "
                       .. "%d s.", key.name, limit, what, wait), wait
end

-- Whether a key may make a request of about so many tokens now: true, and then settle() must be
-- called once when the request has ended; or nil, a message, and after how many seconds it may.
-- Without these seconds it never may.
function M.admit(key, estimate)
  local requests, tokens = key.requests_per_minute, key.tokens_per_minute
  if key.concurrent and gauge.add("key:" .. key.name, 1) > key.concurrent then
    gauge.add("key:" .. key.name, -1)
    return refused(key, "concurrent", string.format(
      "The API key of %s may have %d requests at once and has them. Try again when one has ended.",
      key.name, key.concurrent), 1)
  end
  local limit, message, wait
  if tokens and estimate > tokens then
    limit, message = "tokens", string.format(
      "The request is of about %d tokens, and the API key of %s has %d a minute. Make it smaller.",
      estimate, key.name, tokens)
  else
    wait = requests and charge(key, "requests", requests, 1)
    if wait then
      -- Requests are never owed beyond a minute: more is what other workers take back right now.
      wait = math.min(wait, MINUTE / requests)
      limit = "requests"
      message, wait = wait_text(key, requests, limit, wait)
    else
      wait = tokens and charge(key, "tokens", tokens, estimate)
      if wait then
        limit = "tokens"
        message, wait = wait_text(key, tokens, limit, wait)
        if requests then
          undo(key, "requests", requests, 1)
        end
      end
    end
  end
  if requests then
    tell(key, "requests", requests)
  end
  if tokens then
    tell(key, "tokens", tokens)
  end
  if not limit then
    return true
  end
  if key.concurrent then
    gauge.add("key:" .. key.name, -1)
  end
  return refused(key, limit, message, wait or nil)
end

-- An admitted request has ended and was of so many tokens.
function M.settle(key, estimate, used)
  if key.concurrent then
    gauge.add("key:" .. key.name, -1)
  end
  if key.tokens_per_minute and used ~= estimate then
    undo(key, "tokens", key.tokens_per_minute, estimate - used)
  end
end

return M
