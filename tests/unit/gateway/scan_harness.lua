-- Reads bodies, each behind a line with its size, and prints what the scanner makes of each:
-- kind, microseconds, model in hex, the least tokens and all else as JSON. Arguments: the folder of
-- the modules, rounds a body.
package.path = arg[1] .. "/?.lua;" .. package.path
local cjson = require "cjson"
local scan = require "fleet.scan"
local rounds = tonumber(arg[2])

local function hex(text)
  return (text:gsub(".", function(c) return string.format("%02x", c:byte()) end))
end

while true do
  local size = io.read("*l")
  if not size then
    break
  end
  local body = tonumber(size) > 0 and io.read(tonumber(size)) or ""
  io.read("*l")
  local found
  local began = os.clock()
  for _ = 1, rounds do
    found = scan.request(body)
  end
  local micros = (os.clock() - began) / rounds * 1e6
  local kind, model = scan.model(body)
  assert(kind == found.kind and model == found.model)
  local least = found.parts and scan.least(body, found) or 0
  found.parts, found.model = nil, nil
  found.first = found.first and hex(found.first)
  print(string.format("%s %.3f %s %d %s", kind, micros, hex(model or ""), least,
                      cjson.encode(found)))
end
