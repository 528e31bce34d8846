-- What the deploy wrote for us: pools.json (settings and pools). For keys.json see keys.lua.
--
-- Read once by nginx's master while it loads its configuration, as root, so that a broken file
-- refuses the reload (`nginx -t` runs no Lua and does not see it). The text of pools.json also goes
-- to shared memory: requests that an older worker still holds after a reload then see the instances
-- of today.

local cjson = require "cjson"

local changes = require "fleet.changes"

local state = ngx.shared.fleet_state

local M = {}

local stamp, settings, pools, by_name

-- What a file of ours holds, and its text; raises with a message for the operator.
function M.read(path)
  local file, err = io.open(path, "rb")
  if not file then
    error("vllm-fleet: " .. err .. "; run the deploy for this gateway again", 0)
  end
  local text = file:read("*a")
  file:close()
  local ok, value = pcall(cjson.decode, text)
  if not ok then
    error("vllm-fleet: " .. path .. " is not JSON (" .. value
          .. "); run the deploy for this gateway again", 0)
  end
  return value, text
end

local function use(value)
  settings, pools, by_name = value.settings, value.pools, {}
  settings.session_variables = {}  -- of nginx, for the headers
  for i, name in ipairs(settings.session_headers) do
    settings.session_variables[i] = "http_" .. name:lower():gsub("-", "_")
  end
  for _, pool in ipairs(pools) do
    by_name[pool.name] = pool
    for _, alias in ipairs(pool.aliases) do
      by_name[alias] = pool
    end
    pool.adapters = {}
    for _, adapter in ipairs(pool.loras) do
      by_name[adapter] = pool
      pool.adapters[adapter] = true
    end
    for _, instance in ipairs(pool.instances) do
      instance.id = instance.host .. "/" .. instance.name
    end
  end
end

-- In init_by_lua; raises with a message for the operator.
function M.load(directory)
  local value, text = M.read(directory .. "/pools.json")
  use(value)
  stamp = ngx.md5(text)
  state:set("pools", text)
  state:set("pools_stamp", stamp)
  changes.happened()
end

local changed = changes.watch()

local function refresh()
  local now = changed() and state:get("pools_stamp")
  if now and now ~= stamp then
    use(cjson.decode(state:get("pools")))
    stamp = now
  end
end

function M.settings()
  return settings
end

function M.pools()
  refresh()
  return pools
end

-- The pool that serves this name, alias or LoRA adapter, or nil.
function M.pool(name)
  refresh()
  return by_name[name]
end

-- Whether the name is that of a LoRA adapter of the pool.
function M.is_adapter(pool, name)
  return name ~= nil and pool.adapters[name] == true
end

return M
