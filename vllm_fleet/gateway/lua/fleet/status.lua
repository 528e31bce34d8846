-- How the gateway, its pools and their instances are now: gathered once, told to programs as JSON
-- here and to people as HTML by fleet.page.

local answer = require "fleet.answer"
local config = require "fleet.config"
local gauge = require "fleet.gauge"
local pools = require "fleet.pool"
local rates = require "fleet.rates"

local M = {}

local quote = answer.quote

-- The state of one instance in a word: "ready" where it gets requests.
local WORDS = {drained = "draining", broken = "broken", ["not ready"] = "not ready"}

local function word(instance, draining)
  local why = pools.why_not(instance)
  return draining and "draining" or why and WORDS[why] or "ready"
end

-- Everything that is told, as a table. Rates are nil where nothing was measured yet.
function M.gather()
  local settings = config.settings()
  local rate = rates.now()
  local all = {
    gateway = settings.name or "", time = ngx.time(), held = gauge.get("held"), queued = 0,
    hold_requests = settings.hold_requests, hold_seconds = settings.hold_seconds,
    in_flight = 0, ready = 0, size = 0, pools = {},
  }
  -- The sum over a pool or over all; nil stays nil.
  local function add(to, requests, failures, tokens)
    if requests then
      to.requests = (to.requests or 0) + requests
      to.failures = (to.failures or 0) + failures
      to.tokens = (to.tokens or 0) + tokens
    end
  end
  for i, pool in ipairs(config.pools()) do
    local one = {
      name = pool.name, aliases = pool.aliases, held = gauge.get("held:" .. pool.name),
      queued = gauge.get("queued:" .. pool.name), in_flight = 0, ready = 0,
      size = #pool.instances, instances = {},
    }
    add(one, rate("p:" .. pool.name))
    for j, instance in ipairs(pool.instances) do
      local ready, draining = pools.is_ready(instance), pools.is_draining(instance.id)
      local each = {
        id = instance.id, host = instance.host, name = instance.name,
        address = instance.address, port = instance.port, release = instance.release or "",
        vllm_version = instance.vllm_version or "", ready = ready, draining = draining,
        state = word(instance, draining), in_flight = pools.in_flight(instance),
        limit = instance.limit,
      }
      add(each, rate("i:" .. instance.id))
      add(one, each.requests, each.failures, each.tokens)
      one.in_flight = one.in_flight + each.in_flight
      one.ready = one.ready + (each.state == "ready" and 1 or 0)
      one.instances[j] = each
    end
    add(all, one.requests, one.failures, one.tokens)
    all.in_flight, all.queued = all.in_flight + one.in_flight, all.queued + one.queued
    all.ready, all.size = all.ready + one.ready, all.size + one.size
    all.pools[i] = one
  end
  return all
end

local function array(list, item)
  local out = {}
  for i, value in ipairs(list) do
    out[i] = item(value)
  end
  return "[" .. table.concat(out, ",") .. "]"
end

local function number(value)
  return value and string.format("%.3f", value) or "null"
end

local function speeds(of)
  return string.format(
    '"requests_per_second":%s,"failures_per_second":%s,"tokens_per_second":%s',
    number(of.requests), number(of.failures), number(of.tokens))
end

-- One instance as JSON, without its speeds.
function M.instance(each)
  return string.format(
    '"host":%s,"name":%s,"address":%s,"port":%d,"release":%s,"vllm_version":%s,"ready":%s,'
    .. '"draining":%s,"state":%s,"in_flight":%d,"limit":%d',
    quote(each.host), quote(each.name), quote(each.address),
    each.port, quote(each.release), quote(each.vllm_version), tostring(each.ready),
    tostring(each.draining), quote(each.state), each.in_flight, each.limit)
end

function M.json(all)
  return string.format(
    '{"gateway":%s,"time":%d,"ready":%d,"instances":%d,"in_flight":%d,"queued":%d,"held":%d,'
    .. '"hold_requests":%d,"hold_seconds":%d,%s,"pools":%s}',
    quote(all.gateway), all.time, all.ready, all.size, all.in_flight, all.queued, all.held,
    all.hold_requests, all.hold_seconds, speeds(all), array(all.pools, function(pool)
      return string.format(
        '{"name":%s,"aliases":%s,"ready":%d,"in_flight":%d,"queued":%d,"held":%d,%s,'
        .. '"instances":%s}', quote(pool.name), array(pool.aliases, quote), pool.ready,
        pool.in_flight, pool.queued, pool.held, speeds(pool),
        array(pool.instances, function(each)
          return "{" .. M.instance(each) .. "," .. speeds(each) .. "}"
        end))
    end))
end

return M
