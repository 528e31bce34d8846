-- Reads calls of fleet.limits as JSON, one a line, and prints what each gave as JSON. Shared memory
-- and the clock are tables here. Argument: the folder of the modules.
package.path = arg[1] .. "/?.lua;" .. package.path
local cjson = require "cjson"

local now = 1.8e9
local values = {}
local dict = {}

function dict.get(_, key)
  return values[key]
end

function dict.add(_, key, value)
  if values[key] ~= nil then
    return false, "exists"
  end
  values[key] = value
  return true
end

function dict.delete(_, key)
  values[key] = nil
end

dict.safe_add = dict.add

function dict.incr(_, key, by, init)
  if values[key] == nil and init == nil then
    return nil, "not found"
  end
  values[key] = (values[key] or init) + by
  return values[key]
end

ngx = {
  shared = {fleet_state = dict, fleet_metrics = dict},
  header = {},
  now = function() return now end,
  worker = {pid = function() return 1 end},
}
package.loaded["fleet.config"] = {}
local gauge = require "fleet.gauge"
local limits = require "fleet.limits"

for line in io.lines() do
  local call = cjson.decode(line)
  local key = call.key
  ngx.header = {}
  now = now + (call.after or 0)
  local result = {}
  if call.run == "admit" then
    local ok, message, wait = limits.admit(key, call.estimate or 0)
    result = {ok = ok or false, message = message, wait = wait}
  elseif call.run == "settle" then
    limits.settle(key, call.estimate or 0, call.used or 0)
  end
  result.header, result.running = ngx.header, key and gauge.get("key:" .. key.name)
  print(cjson.encode(result))
end
