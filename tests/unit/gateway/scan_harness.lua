-- Reads bodies, each behind a line with its size, and prints what the scanner makes of each:
-- kind, microseconds, model in hex. Arguments: the folder of the modules, rounds a body.
package.path = arg[1] .. "/?.lua;" .. package.path
local scan = require "fleet.scan"
local rounds = tonumber(arg[2])

while true do
  local size = io.read("*l")
  if not size then
    break
  end
  local body = tonumber(size) > 0 and io.read(tonumber(size)) or ""
  io.read("*l")
  local kind, name
  local began = os.clock()
  for _ = 1, rounds do
    kind, name = scan.model(body)
  end
  local micros = (os.clock() - began) / rounds * 1e6
  local hex = (name or ""):gsub(".", function(c) return string.format("%02x", c:byte()) end)
  print(string.format("%s %.3f %s", kind, micros, hex))
end
