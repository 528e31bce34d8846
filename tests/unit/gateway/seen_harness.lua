-- Runs one of the small modules that need no nginx. Arguments: the folder of the modules, what to
-- run. Texts come on standard input as hex, one a line; answers go out the same way.
package.path = arg[1] .. "/?.lua;" .. package.path

local function from_hex(line)
  return (line:gsub("..", function(c) return string.char(tonumber(c, 16)) end))
end

local function say(text)
  print((text:gsub(".", function(c) return string.format("%02x", c:byte()) end)))
end

local lines = {}
for line in io.lines() do
  lines[#lines + 1] = from_hex(line)
end

if arg[2] == "utf8" then
  local utf8 = require "fleet.utf8"
  for _, line in ipairs(lines) do
    local mended = utf8.mended(line)
    say(mended and "+" .. mended or "-")
  end
elseif arg[2] == "near" then
  local near = require "fleet.near"
  for _, name in ipairs(near.nearest(table.remove(lines, 1), lines, 3)) do
    say(name)
  end
elseif arg[2] == "distance" then
  for i = 1, #lines, 2 do
    say(tostring(require("fleet.near").distance(lines[i], lines[i + 1])))
  end
elseif arg[2] == "page" then
  -- One text stands in every place that takes one.
  local text, count = lines[1], tonumber(lines[2])
  local instances = {}
  for i = 1, count do
    instances[i] = {
      id = text .. "/" .. i, host = text, name = tostring(i), address = text, port = 8000 + i,
      release = text, vllm_version = text, state = i % 2 == 0 and "not ready" or "ready",
      ready = i % 2 == 1, draining = false, in_flight = i, requests = i / 7, failures = 0,
      tokens = 0,
    }
  end
  say(require("fleet.page").html({
    gateway = text, time = 0, held = 1, queued = 2, in_flight = 3, ready = count / 2, size = count,
    pools = {{
      name = text, aliases = {text}, held = 1, queued = 2, in_flight = 3, ready = count / 2,
      size = count, instances = instances, requests = 1234.5, failures = 0.01, tokens = 3,
    }},
  }, "NONCE"))
end
