-- Reads cases as JSON, one a line, and prints what fleet.usage makes of each as JSON.
-- Argument: the folder of the modules. Pieces of answers come and go in hex: they may hold anything.
package.path = arg[1] .. "/?.lua;" .. package.path
local cjson = require "cjson"
ngx = {header = {}}
local usage = require "fleet.usage"

local function raw(hex)
  return (hex:gsub("%x%x", function(pair) return string.char(tonumber(pair, 16)) end))
end

local function hex(text)
  return (text:gsub(".", function(c) return string.format("%02x", c:byte()) end))
end

local RUN = {}

-- An answer, piece by piece.
function RUN.read(case)
  ngx.status = case.status
  ngx.header = case.header
  local s, out = usage.head(case.hide), {}
  for i, piece in ipairs(case.pieces) do
    out[i] = hex(usage.body(s, raw(piece), false))
  end
  if case.whole then
    out[#out + 1] = hex(usage.body(s, "", true))
  end
  local prompt, completion = usage.cost(s, case.status, true, 100, 40)
  return {out = out, cost = {prompt, completion}, length = ngx.header["Content-Length"]}
end

function RUN.ask(case)
  return {body = usage.ask(case.uri, case.found, case.body)}
end

function RUN.estimate(case)
  return {usage.estimate(case.uri, case.found)}
end

function RUN.cost(case)
  return {usage.cost(nil, case.status, case.with_instance, 100, 40)}
end

for line in io.lines() do
  local case = cjson.decode(line)
  print(cjson.encode(RUN[case.run](case)))
end
