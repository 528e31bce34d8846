-- Counters and histograms of what the gateway did, written out in Prometheus's text format.
--
-- All live in shared memory: they survive reloads and the death of a worker; see fleet.counts.
-- What is going on now is not counted here but read from fleet.gauge, which takes off what dead
-- workers left behind.
--
-- How many series there can be is bounded: pools, instances and key owners come from what was
-- deployed, statuses are three digits, and nothing that a client sends becomes a label. Series of
-- what is no longer deployed go at the next reload. What is beyond the limit of
-- fleet.counts is left out, and vllm_fleet_gateway_series_dropped_total says so.

local config = require "fleet.config"
local counts = require "fleet.counts"
local gauge = require "fleet.gauge"
local pools = require "fleet.pool"
local rates = require "fleet.rates"

local store = ngx.shared.fleet_metrics
local gather = counts.gather

local M = {}

local TOKENS = "vllm_fleet_gateway_tokens_total"

-- From a cached short answer to the longest hold and the longest answer that people set.
local FIRST_BYTE = {0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 900}
local DURATION = {0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1200, 3600}

local COUNTERS = {
  {"vllm_fleet_gateway_requests_total",
   "Requests answered, by pool, instance and status; no instance where the gateway answered."},
  {"vllm_fleet_gateway_key_requests_total", "Requests answered, by owner of the key and status."},
  {"vllm_fleet_gateway_tokens_total", "Tokens of prompts and answers, by key's owner and pool."},
  {"vllm_fleet_gateway_limited_total", "Requests refused by a limit of their key."},
  {"vllm_fleet_gateway_key_refused_total", "Requests without a good key, by reason."},
  {"vllm_fleet_gateway_retries_total", "Tries given to another instance, by pool and reason."},
  {"vllm_fleet_gateway_refused_total", "Requests refused by the gateway, by pool and reason."},
  -- Further counters: a line here, then M.count.
}

local HISTOGRAMS = {
  {"vllm_fleet_gateway_first_byte_seconds",
   "From a request's first byte to its answer's first, waits included; status below 400.",
   FIRST_BYTE},
  {"vllm_fleet_gateway_duration_seconds",
   "From a request's first byte to its answer's last, waits included; status below 400.",
   DURATION},
}
local FIRST_BYTE_AT, DURATION_AT = 1, 2  -- in HISTOGRAMS

local function escape(value)
  return (value:gsub('[\\"\n]', {["\\"] = "\\\\", ['"'] = '\\"', ["\n"] = "\\n"}))
end
M.escape = escape

-- Add `by`, or one; `labels` as written between the braces, values escaped.
function M.count(name, labels, by)
  counts.add(name .. "{" .. labels .. "}", by or 1)
end

-- A table that makes each of its values, from the key, when it is first asked for. Names of series
-- are made so: there are few, and each request would make half a dozen of them anew.
local function made_once(make)
  return setmetatable({}, {__index = function(made, key)
    local value = make(key)
    made[key] = value
    return value
  end})
end

local token_series = made_once(function(pool)
  return made_once(function(key)
    local labels = string.format('%s{pool="%s",key="%s",kind=', TOKENS, escape(pool), escape(key))
    return {labels .. '"prompt"}', labels .. '"completion"}'}
  end)
end)

-- Tokens of one request, for chargeback.
function M.tokens(pool, key, prompt, completion)
  local series = token_series[pool][key]
  gather(series[1], prompt)
  gather(series[2], completion)
  rates.tokens(pool, prompt + completion)
end

-- Labels of a pool, and of one of its instances.
local function write_labels(pool, host, name)
  return string.format('pool="%s",host="%s",instance="%s"', escape(pool), escape(host),
                       escape(name))
end
local labels_without = made_once(function(pool)
  return write_labels(pool, "", "")
end)
local labels_with = made_once(function(pool)
  return made_once(function(id)
    return write_labels(pool, id:match("^(.-)/(.*)$"))
  end)
end)

local function labels_of(pool, instance)
  if instance then
    return labels_with[pool][instance.id]
  end
  return labels_without[pool]
end

local request_series = made_once(function(labels)
  return made_once(function(status)
    return string.format('vllm_fleet_gateway_requests_total{%s,code="%d"}', labels, status)
  end)
end)
local key_series = made_once(function(pool)
  return made_once(function(key)
    return made_once(function(status)
      return string.format(
        'vllm_fleet_gateway_key_requests_total{key="%s",pool="%s",code="%d"}', escape(key),
        escape(pool), status)
    end)
  end)
end)

local buckets = {}
for at = 1, #HISTOGRAMS do
  buckets[at] = made_once(function(labels)
    return made_once(function(bucket)
      return "h" .. at .. "\n" .. labels .. "\n" .. bucket
    end)
  end)
end

-- Each observation is booked in its own bucket alone; text() adds them up.
local function observe(at, labels, value)
  local bounds = HISTOGRAMS[at][3]
  local bucket = #bounds + 1
  for i = 1, #bounds do
    if value <= bounds[i] then
      bucket = i
      break
    end
  end
  local series = buckets[at][labels]
  gather(series[bucket], 1)
  gather(series.sum, value)
end

-- One request that has ended. `instance` is the last one that it was given to, or nil; `key` the
-- owner of the key; `first_byte` and `seconds` are times since the request began, or nil.
function M.request(pool, instance, key, status, first_byte, seconds)
  local labels = labels_of(pool, instance)
  gather(request_series[labels][status], 1)
  gather(key_series[pool][key][status], 1)
  if status < 400 and instance then
    if first_byte then
      observe(FIRST_BYTE_AT, labels, first_byte)
    end
    if seconds then
      observe(DURATION_AT, labels, seconds)
    end
  end
  rates.request(pool, instance, status)
end

-- In init_by_lua, after config.load: drop the series of pools and instances that are gone.
function M.prune()
  local known = {["-"] = true}
  for _, pool in ipairs(config.pools()) do
    known[escape(pool.name)] = true
    for _, instance in ipairs(pool.instances) do
      known[labels_of(pool.name, instance)] = true
      known["i:" .. instance.id] = true
    end
    known["p:" .. pool.name] = true
  end
  local left = 0
  for _, series in ipairs(store:get_keys(0)) do
    local pool = series:match('pool="(.-[^\\])"')
    local total = series:match("^total:%w+:(.+)$")
    if total then
      if not known[total] then
        store:delete(series)
      end
    elseif pool then
      local whole = series:match('pool=".-",host=".-",instance="[^,}\n]+"')
      if not known[pool] or (whole and not known[whole]) then
        store:delete(series)
      else
        left = left + 1
      end
    end
  end
  store:set("series", left)
end

local function write_histogram(out, name, bounds, values)
  local labels = {}
  for each in pairs(values) do
    labels[#labels + 1] = each
  end
  table.sort(labels)
  for _, each in ipairs(labels) do
    local found, total = values[each], 0
    for i = 1, #bounds + 1 do
      total = total + (found[tostring(i)] or 0)
      out[#out + 1] = string.format('%s_bucket{%s,le="%s"} %d', name, each, bounds[i] or "+Inf",
                                    total)
    end
    out[#out + 1] = string.format("%s_sum{%s} %.3f", name, each, found.sum or 0)
    out[#out + 1] = string.format("%s_count{%s} %d", name, each, total)
  end
end

-- What goes on now, and how the instances are.
local function write_gauges(out)
  local ready, draining, in_flight, queued, held = {}, {}, {}, {}, {}
  local function line(list, name, labels, value)
    list[#list + 1] = string.format("vllm_fleet_gateway_%s{%s} %d", name, labels, value)
  end
  for _, pool in ipairs(config.pools()) do
    local of_pool = 'pool="' .. escape(pool.name) .. '"'
    line(held, "held", of_pool, gauge.get("held:" .. pool.name))
    line(queued, "queued", of_pool, gauge.get("queued:" .. pool.name))
    for _, instance in ipairs(pool.instances) do
      local labels = labels_of(pool.name, instance)
      local drained = pools.is_draining(instance.id)
      line(ready, "instance_ready", labels, pools.is_ready(instance) and not drained and 1 or 0)
      line(draining, "instance_draining", labels, drained and 1 or 0)
      line(in_flight, "in_flight", labels, gauge.get("flight:" .. instance.id))
    end
  end
  local connections = {}
  for _, state in ipairs({"active", "reading", "writing", "waiting"}) do
    local count = ngx.var["connections_" .. state]
    if count then
      line(connections, "connections", 'state="' .. state .. '"', tonumber(count))
    end
  end
  for _, family in ipairs({
    {"vllm_fleet_gateway_instance_ready", "1 while the instance may get requests.", ready},
    {"vllm_fleet_gateway_instance_draining", "1 while an operator keeps requests away.", draining},
    {"vllm_fleet_gateway_in_flight", "Requests now with the instance.", in_flight},
    {"vllm_fleet_gateway_queued", "Requests now waiting for room in the pool.", queued},
    {"vllm_fleet_gateway_held", "Requests now waiting for a ready instance of the pool.", held},
    {"vllm_fleet_gateway_connections", "Connections of nginx, clients' and ours.", connections},
  }) do
    if #family[3] > 0 then
      out[#out + 1] = "# HELP " .. family[1] .. " " .. family[2]
      out[#out + 1] = "# TYPE " .. family[1] .. " gauge"
      for _, each in ipairs(family[3]) do
        out[#out + 1] = each
      end
    end
  end
end

function M.text()
  counts.flush()
  local counted, observed = {}, {}
  for at = 1, #HISTOGRAMS do
    observed[at] = {}
  end
  for _, series in ipairs(store:get_keys(0)) do
    local at, labels, part = series:match("^h(%d)\n(.*)\n(%w+)$")
    if at then
      local of = observed[tonumber(at)]
      of[labels] = of[labels] or {}
      of[labels][part] = store:get(series)
    else
      local name = series:match("^([%w_]+){")
      if name then
        counted[name] = counted[name] or {}
        table.insert(counted[name], series)
      end
    end
  end
  local out = {}
  for _, counter in ipairs(COUNTERS) do
    out[#out + 1] = "# HELP " .. counter[1] .. " " .. counter[2]
    out[#out + 1] = "# TYPE " .. counter[1] .. " counter"
    local series = counted[counter[1]] or {}
    table.sort(series)
    for _, each in ipairs(series) do
      out[#out + 1] = each .. " " .. string.format("%.14g", store:get(each) or 0)
    end
  end
  out[#out + 1] = "# HELP vllm_fleet_gateway_series_dropped_total Times that a new series found "
                  .. "no room."
  out[#out + 1] = "# TYPE vllm_fleet_gateway_series_dropped_total counter"
  out[#out + 1] = "vllm_fleet_gateway_series_dropped_total " .. (store:get("dropped") or 0)
  for at, histogram in ipairs(HISTOGRAMS) do
    out[#out + 1] = "# HELP " .. histogram[1] .. " " .. histogram[2]
    out[#out + 1] = "# TYPE " .. histogram[1] .. " histogram"
    write_histogram(out, histogram[1], histogram[3], observed[at])
  end
  write_gauges(out)
  return table.concat(out, "\n") .. "\n"
end

return M
