-- Who asks, and what they may: the key a client shows, looked up by its SHA-256.
--
-- Neither memory nor disk of the gateway holds a key. The look-up takes no constant time, and need
-- not: what it compares are digests, and how far a guess's digest agrees with a real one says
-- nothing about the key, as nobody can choose a digest.
--
-- keys.json is read by nginx's master with its configuration, and again by every worker when it
-- changes, so that a new or a withdrawn key needs no reload.

local cjson = require "cjson"
local ffi = require "ffi"

local answer = require "fleet.answer"
local config = require "fleet.config"
local metrics = require "fleet.metrics"

-- Of libcrypto, which nginx itself is linked with. SHA256() in one call looks its algorithm up by
-- name each time in OpenSSL 3, which takes longer than the digest.
pcall(ffi.cdef, [[
  struct vllm_fleet_sha256 { uint32_t words[28]; };  // SHA256_CTX in all releases
  int SHA256_Init(struct vllm_fleet_sha256 *c);
  int SHA256_Update(struct vllm_fleet_sha256 *c, const void *data, size_t n);
  int SHA256_Final(unsigned char *digest, struct vllm_fleet_sha256 *c);
]])

local state = ngx.shared.fleet_state

local byte, sub = string.byte, string.sub

local M = {}

local TICK = 1  -- seconds between looks at keys.json
local OPEN = {name = "-"}  -- who asks where no key is asked for

local path, seen, trouble
local records  -- {digest = record}, or nil where no key is asked for

local digest, context = ffi.new("unsigned char[32]"), ffi.new("struct vllm_fleet_sha256")

local function sha256(text)
  ffi.C.SHA256_Init(context)
  ffi.C.SHA256_Update(context, text, #text)
  ffi.C.SHA256_Final(digest, context)
  return ffi.string(digest, 32)
end

local function raw(hex)
  return (hex:gsub("%x%x", function(pair)
    return string.char(tonumber(pair, 16))
  end))
end

-- The keys of what keys.json holds; raises where that is not what a deploy writes.
local function records_of(value)
  assert(type(value.required) == "boolean" and type(value.keys) == "table", "no list of keys")
  if not value.required then
    return nil
  end
  local found = {}
  for _, record in ipairs(value.keys) do
    assert(type(record.name) == "string" and type(record.sha256) == "string"
           and record.sha256:match("^%x+$") and #record.sha256 == 64, "an entry is no key")
    if record.models then
      local names = {}
      for _, name in ipairs(record.models) do
        names[name] = true
      end
      record.models = names
    end
    found[raw(record.sha256)] = record
  end
  return found
end

-- In init_by_lua; raises with a message for the operator.
function M.load(directory)
  path = directory .. "/keys.json"
  local value, text = config.read(path)
  local ok, found = pcall(records_of, value)
  if not ok then
    error("vllm-fleet: " .. path .. ": " .. found .. "; run the deploy for this gateway again", 0)
  end
  records, seen, trouble = found, text, nil
end

-- One worker of all says it.
local function say(level, ...)
  local text = table.concat({"vllm-fleet: ", path, ...})
  if state:add("said:" .. ngx.md5(text), 1, 60) then
    ngx.log(level, text)
  end
end

-- Take keys.json as it is now; keep the keys there are where it cannot be used.
local function look(premature)
  if premature then
    return
  end
  local file, err = io.open(path, "rb")
  local text = file and file:read("*a")
  if file then
    file:close()
  end
  if not text then
    if err ~= trouble then
      trouble = err
      say(ngx.ERR, " cannot be read again (", err or "no text", "): the keys last read hold. Run "
          .. "the deploy for this gateway again, or reload nginx")
    end
    return
  end
  trouble = nil
  if text == seen then
    return
  end
  seen = text
  local ok, found = pcall(function()
    return records_of(cjson.decode(text))
  end)
  if not ok then
    say(ngx.ERR, " changed and cannot be used (", found, "): the keys last read hold. Run the "
        .. "deploy for this gateway again")
    return
  end
  records = found
  say(ngx.NOTICE, " changed: the keys in it hold from now on")
end

-- In init_worker_by_lua.
function M.start()
  ngx.timer.every(TICK, look)
end

-- The record of the key that this request shows; or nil, why ("missing", "unknown", "expired") and
-- the record of a key that has expired. OpenAI's clients send `Authorization: Bearer`, Anthropic's
-- `x-api-key`.
function M.find()
  if not records then
    return OPEN
  end
  local shown = ngx.var.http_authorization
  if shown and sub(shown, 1, 7) == "Bearer " and byte(shown, 8) ~= 32 and #shown > 7 then
    shown = sub(shown, 8)
  else
    shown = shown and shown:match("^[Bb][Ee][Aa][Rr][Ee][Rr] +(.+)$") or ngx.var.http_x_api_key
  end
  if not shown then
    return nil, "missing"
  end
  local record = records[sha256(shown)]
  if not record then
    return nil, "unknown"
  end
  if record.expires and ngx.time() >= record.expires then
    return nil, "expired", record
  end
  return record
end

local WHY = {
  missing = "No API key. Send it as `Authorization: Bearer KEY`.",
  unknown = "This gateway does not know the API key. Send it as `Authorization: Bearer KEY`.",
}

-- Ends a request that find() gave no key for.
function M.refuse(why, record)
  metrics.count("vllm_fleet_gateway_key_refused_total", 'reason="' .. why .. '"')
  ngx.header["WWW-Authenticate"] = "Bearer"
  if record then
    ngx.var.fleet_key = record.name  -- for the log: an owner to be told
  end
  return answer.error(401, WHY[why] or string.format(
    "The API key of %s expired (%s). Ask the operator for a new one.", record.name,
    record.expires_text or os.date("!%Y-%m-%dT%H:%M:%SZ", record.expires)))
end

-- Whether a key is for the model that is asked for by this name (nil: by none) in this pool. A key
-- for one name of a model is for its others too; other names in the pool (adapters) count alone.
function M.may_use(key, pool, name)
  local models = key.models
  if not models then
    return true
  end
  name = name or pool.name
  if models[name] then
    return true
  end
  local is_model, allowed = name == pool.name, models[pool.name]
  for _, alias in ipairs(pool.aliases) do
    is_model, allowed = is_model or name == alias, allowed or models[alias]
  end
  return is_model and allowed or false
end

-- Ends a request for a model that its key is not for.
function M.refuse_model(key, pool, name)
  metrics.count("vllm_fleet_gateway_key_refused_total", 'reason="model"')
  return answer.error(403, string.format("The API key of %s is not for the model `%s`.", key.name,
                                         name or pool.name), "model")
end

return M
