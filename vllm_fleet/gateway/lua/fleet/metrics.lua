-- Counters, kept in shared memory, written out in Prometheus's text format.

local config = require "fleet.config"
local gauge = require "fleet.gauge"

local counters = ngx.shared.fleet_metrics

local M = {}

local COUNTERS = {
  {"vllm_fleet_gateway_requests_total", "Requests answered, by pool and status."},
  {"vllm_fleet_gateway_retries_total", "Tries given to another instance, by pool and reason."},
  {"vllm_fleet_gateway_refused_total", "Requests refused by the hold, by pool and reason."},
  {"vllm_fleet_gateway_tokens_total", "Tokens of prompts and answers, by pool and key's owner."},
  {"vllm_fleet_gateway_limited_total", "Requests refused by a limit of their key."},
  {"vllm_fleet_gateway_key_refused_total", "Requests without a good key, by reason."},
}

-- Add `by`, else one; `labels` as written between the braces.
function M.count(name, labels, by)
  counters:incr(name .. "{" .. labels .. "}", by or 1, 0)
end

-- A text as the value of a label.
local function escape(value)
  return (value:gsub('[\\"\n]', {["\\"] = "\\\\", ['"'] = '\\"', ["\n"] = "\\n"}))
end
M.escape = escape

-- Tokens of one request, for chargeback.
function M.tokens(pool, key, prompt, completion)
  local labels = string.format('pool="%s",key="%s",', escape(pool), escape(key))
  M.count("vllm_fleet_gateway_tokens_total", labels .. 'kind="prompt"', prompt)
  M.count("vllm_fleet_gateway_tokens_total", labels .. 'kind="completion"', completion)
end

function M.text()
  local out, series = {}, counters:get_keys(0)
  table.sort(series)
  for _, counter in ipairs(COUNTERS) do
    local name = counter[1]
    out[#out + 1] = "# HELP " .. name .. " " .. counter[2]
    out[#out + 1] = "# TYPE " .. name .. " counter"
    for _, key in ipairs(series) do
      if key:sub(1, #name + 1) == name .. "{" then
        out[#out + 1] = key .. " " .. counters:get(key)
      end
    end
  end
  local ready, in_flight, held = {}, {}, {}
  for _, pool in ipairs(config.pools()) do
    held[#held + 1] = string.format('vllm_fleet_gateway_held{pool="%s"} %d', pool.name,
                                    gauge.get("held:" .. pool.name))
    for _, instance in ipairs(pool.instances) do
      local labels = string.format('{pool="%s",host="%s",instance="%s"}', pool.name, instance.host,
                                   instance.name)
      ready[#ready + 1] = string.format("vllm_fleet_gateway_instance_ready%s %d", labels,
        ngx.shared.fleet_state:get("ready:" .. instance.id) == 1 and 1 or 0)
      in_flight[#in_flight + 1] = string.format("vllm_fleet_gateway_in_flight%s %d", labels,
        gauge.get("flight:" .. instance.id))
    end
  end
  for _, family in ipairs({
    {"vllm_fleet_gateway_instance_ready", "1 while the instance may get requests.", ready},
    {"vllm_fleet_gateway_in_flight", "Requests now with the instance.", in_flight},
    {"vllm_fleet_gateway_held", "Requests now waiting for a ready instance of the pool.", held},
  }) do
    out[#out + 1] = "# HELP " .. family[1] .. " " .. family[2]
    out[#out + 1] = "# TYPE " .. family[1] .. " gauge"
    for _, line in ipairs(family[3]) do
      out[#out + 1] = line
    end
  end
  return table.concat(out, "\n") .. "\n"
end

return M
