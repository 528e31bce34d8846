-- The instances of a pool: which may get requests, and which one gets the next.
--
-- An instance gets requests while it says that it is ready, carries no drain mark, and its breaker
-- is closed. Of those, the ones whose context is the smallest that fits come first; larger ones are
-- for what the smaller cannot hold and for what is too much for them, never the other way round.
-- Among equals affinity decides while the load allows it, else the fewest requests in flight.
--
-- In shared memory (fleet_state), by the instance's id:
--   ready:  1 or 0              down:   1 while /fleet/ready itself said that it is not ready
--   drain:  1 while marked      fails:  failures in a row     trips: times the breaker opened
--   open:   when an open breaker lets a request try again; absent while it is closed
--   probe:  that request is under way
-- Of these, requests look at a worker's copy of ready, drain, open and fails; who changes one says
-- so to fleet.changes.

local bit = require "bit"
local ffi = require "ffi"

local changes = require "fleet.changes"
local config = require "fleet.config"
local gauge = require "fleet.gauge"

local state = ngx.shared.fleet_state

local bxor, rshift = bit.bxor, bit.rshift
local floor, max, min = math.floor, math.max, math.min

local M = {}

-- Breaker: this many failures in a row take an instance out, for a second at first and twice as
-- long each time. Failures are connections that could not be made or broke before an answer, and
-- refusals of the gate; an error that the engine answers speaks for no fault of the instance.
local FAILURES, FIRST_OUT, LONGEST_OUT = 5, 1, 60
-- How long one request may be the only one that tries a broken instance: a long answer's first
-- byte may be far away.
local PROBE = 10

-- No instance gets a request by affinity that would bring it over this many times the mean. Two are
-- always allowed: the next request of a conversation comes before its last one is booked off.
local BOUND, ALWAYS = 1.3, 2

local changed = changes.watch()
local copies = {}  -- by id

-- What is known of an instance. fresh() comes first, once for all that are looked at together.
local function known_of(instance)
  local id = instance.id
  local known = copies[id]
  if not known then
    known = {
      ready = state:get("ready:" .. id) == 1,
      draining = state:get("drain:" .. id) ~= nil,
      open = state:get("open:" .. id),
      fails = state:get("fails:" .. id),
    }
    copies[id] = known
  end
  return known
end

local function fresh()
  if changed() then
    copies = {}
  end
end

-- Ready

function M.is_ready(instance)
  return state:get("ready:" .. instance.id) == 1
end

-- Book what was learnt of an instance; a change is worth a line in the error log.
function M.set_ready(instance, ready, why)
  local key, value = "ready:" .. instance.id, ready and 1 or 0
  if state:get(key) ~= value then
    state:set(key, value)
    changes.happened()
    ngx.log(ready and ngx.NOTICE or ngx.ERR, "vllm-fleet: ", instance.id,
            ready and " is ready" or " is not ready: ", ready and "" or why)
  end
end

-- The same, as the instance itself said it: one that was down and is ready again was started anew,
-- and its failures of before are gone.
function M.said_ready(instance, ready, why)
  if not ready then
    state:set("down:" .. instance.id, 1)
  elseif state:get("down:" .. instance.id) then
    state:delete("down:" .. instance.id)
    M.worked(instance)
  end
  M.set_ready(instance, ready, why)
end

-- Breaker

-- Book that an instance answered a request, whatever it said.
function M.worked(instance)
  fresh()
  if known_of(instance).fails then
    local id = instance.id
    local was_open = state:get("open:" .. id)
    for _, key in ipairs({"fails:", "trips:", "probe:", "open:"}) do
      state:delete(key .. id)
    end
    changes.happened()
    if was_open then
      ngx.log(ngx.NOTICE, "vllm-fleet: ", id, " answers again; it gets requests as before")
    end
  end
end

-- Book that a request failed on it; `probe`: it was the one that tried a broken instance.
function M.failed(instance, why, probe)
  local id = instance.id
  local fails = state:incr("fails:" .. id, 1, 0)
  changes.happened()
  if state:get("open:" .. id) then
    if not probe then
      return  -- of those that were under way when the breaker opened
    end
  elseif fails < FAILURES then
    return
  end
  local seconds = min(FIRST_OUT * 2 ^ (state:incr("trips:" .. id, 1, 0) - 1), LONGEST_OUT)
  state:set("open:" .. id, ngx.now() + seconds)
  state:delete("probe:" .. id)
  changes.happened()
  ngx.log(ngx.ERR, "vllm-fleet: ", id, " failed ", fails, " times in a row (last: ", why,
          ") although it says that it is ready; it gets nothing for ", seconds,
          " seconds, then one request as a trial. See `journalctl -u vllm@", instance.name,
          "` on ", instance.host)
end

-- Drain marks: a file for each, which the deploy or a person may also make and remove, and a copy
-- in shared memory, which is what requests look at.

pcall(ffi.cdef, [[
  int mkdir(const char *path, unsigned int mode);
  int chown(const char *path, unsigned int owner, unsigned int group);
  struct vllm_fleet_passwd { char *name, *password; unsigned int uid, gid; };
  struct vllm_fleet_passwd *getpwnam(const char *name);
]])

local marks  -- the directory

local function mark_of(instance)
  return marks .. "/" .. instance.host .. ":" .. instance.name
end

local function exists(path)
  local file = io.open(path, "rb")
  if file then
    file:close()
  end
  return file ~= nil
end

-- In init_by_lua, as root: make the directory that the workers, who are not root, write to, and
-- see the marks in it before the first request comes.
function M.open(directory)
  marks = directory
  local path = ""
  for part in directory:gmatch("[^/]+") do
    path = path .. "/" .. part
    ffi.C.mkdir(path, 493)  -- 0755; most exist
  end
  local user = ffi.C.getpwnam("www-data")
  if user ~= nil then
    ffi.C.chown(directory, user.uid, user.gid)
  end
  M.recall()
end

-- Make shared memory say what the files say.
function M.recall()
  for _, pool in ipairs(config.pools()) do
    for _, instance in ipairs(pool.instances) do
      -- drain() and undrain() change the file first: what differs here was changed by others.
      local key, known = "drain:" .. instance.id, M.is_draining(instance.id)
      if exists(mark_of(instance)) ~= known then
        if known then
          state:delete(key)
        else
          state:set(key, 1)
        end
        changes.happened()
        ngx.log(ngx.NOTICE, "vllm-fleet: ", instance.id, known and " is no longer drained"
                or " is drained: it gets no new request", " (", mark_of(instance), ")")
      end
    end
  end
end

function M.is_draining(id)
  return state:get("drain:" .. id) ~= nil
end

-- The instance of this id ("host/name"), or nil.
function M.find(id)
  for _, pool in ipairs(config.pools()) do
    for _, instance in ipairs(pool.instances) do
      if instance.id == id then
        return instance
      end
    end
  end
  return nil
end

-- Give an instance no new request, from now on and over restarts of nginx, until undrain(). Returns
-- its requests in flight, or nil and why not.
function M.drain(id)
  local instance = M.find(id)
  if not instance then
    return nil, "no pool has an instance `" .. id .. "`"
  end
  local file, err = io.open(mark_of(instance), "wb")
  if not file then
    return nil, "the mark cannot be written: " .. err .. "; reload nginx, which makes the directory"
  end
  file:write("drained at ", ngx.utctime(), " UTC through the gateway\n")
  file:close()
  if not M.is_draining(instance.id) then
    state:set("drain:" .. id, 1)
    changes.happened()
    ngx.log(ngx.NOTICE, "vllm-fleet: ", id, " is drained: it gets no new request")
  end
  return M.in_flight(instance)
end

-- Give it requests again. Returns its requests in flight, or nil and why not.
function M.undrain(id)
  local instance = M.find(id)
  if not instance then
    return nil, "no pool has an instance `" .. id .. "`"
  end
  local ok, err = os.remove(mark_of(instance))
  if not ok and exists(mark_of(instance)) then
    return nil, "the mark cannot be removed: " .. err
  end
  if M.is_draining(instance.id) then
    state:delete("drain:" .. id)
    changes.happened()
    ngx.log(ngx.NOTICE, "vllm-fleet: ", id, " is no longer drained")
  end
  return M.in_flight(instance)
end

-- Choice

local flight = setmetatable({}, {__index = function(names, id)  -- names of gauges, built once
  local name = "flight:" .. id
  names[id] = name
  return name
end})

function M.in_flight(instance)
  return gauge.get(flight[instance.id])
end

local function why_not(instance)
  local known = known_of(instance)
  if not known.ready then
    return "not ready"
  elseif known.draining then
    return "drained"
  elseif known.open and (ngx.now() < known.open or state:get("probe:" .. instance.id)) then
    return "broken"
  end
  return nil
end

-- Why an instance gets no requests: "not ready", "drained", "broken"; or nil where it does.
function M.why_not(instance)
  fresh()
  return why_not(instance)
end

-- The instances of a pool by context length, the smallest first. An unknown length counts as the
-- largest: the engine knows it.
local classes = setmetatable({}, {__mode = "k"})

local function shorter(a, b)
  return a.length < b.length
end

local function classes_of(pool)
  local known = classes[pool]
  if not known then
    known = {}
    local by_length = {}
    for _, instance in ipairs(pool.instances) do
      local length = type(instance.max_model_len) == "number" and instance.max_model_len
          or math.huge
      if not by_length[length] then
        by_length[length] = {length = length}
        known[#known + 1] = by_length[length]
      end
      table.insert(by_length[length], instance)
      instance.hash = ngx.crc32_long(instance.id)
      instance.adapters = {}
      for _, name in ipairs(instance.loras or {}) do
        instance.adapters[name] = true
      end
    end
    table.sort(known, shorter)
    for k, class in ipairs(known) do
      class.queue = M.queue_name(pool, k)
    end
    classes[pool] = known
  end
  return known
end

-- The number of the first class that fits `need` tokens; the last where none does.
function M.class(pool, need)
  local all = classes_of(pool)
  for i = 1, #all do
    if need <= all[i].length then
      return i
    end
  end
  return max(#all, 1)
end

-- A number that orders instances for a session: each session its own way, at random and always the
-- same. Without the mixing, of three instances one would get half of all sessions.
local function rank(session, instance)
  local x = bxor(session, instance.hash)
  for _ = 1, 2 do
    x = bit.tobit(bxor(x, rshift(x, 16)) % 4294967296 * 286111)  -- stays below 2^53
  end
  return bxor(x, rshift(x, 16))
end

-- The instance of a class for a request; nil, and whether some are only at their limit.
local turn = 0
local usable, counts = {}, {}  -- of the request that is looked at; what is behind `found` is older

local function choose(class, request)
  local found, total, full = 0, 0, false
  local tried, lora = request.tried, request.lora
  turn = turn + 1
  local size = #class
  for i = 1, size do
    local instance = class[(turn + i) % size + 1]
    if not (tried and tried[instance.id]) and (not lora or instance.adapters[lora])
        and not why_not(instance) then
      local count = gauge.get(flight[instance.id])
      found = found + 1
      usable[found], counts[found] = instance, count
      total = total + count
    end
  end
  local session = found > 1 and request.affinity
  local bound = session and max(ALWAYS, floor(BOUND * (total + 1) / found))
  local best, best_count, best_rank, best_bound
  for i = 1, found do
    local instance, count = usable[i], counts[i]
    if count >= instance.limit then
      full = true
    elseif session then
      -- First those within the bound, by rank; else the fewest in flight, like ones by rank.
      local within, order = count < bound, rank(session, instance)
      local better
      if not best or within ~= best_bound then
        better = not best or within
      elseif within or count == best_count then
        better = order > best_rank
      else
        better = count < best_count
      end
      if better then
        best, best_count, best_rank, best_bound = instance, count, order, within
      end
    elseif not best or count < best_count then
      best, best_count = instance, count
    end
  end
  return best, full
end

-- The name of the gauge of requests that wait in the queue for this class of a pool.
function M.queue_name(pool, class)
  return "queued:" .. pool.name .. ":" .. class
end

-- Give a request an instance and book it there. Returns the instance; or nil and "full", where
-- those that could serve are at their limit or others wait for them, or "none", where there is
-- none. `first`: the request is the first of its queue, so nobody waits before it.
function M.take(pool, request, first)
  local all, why = classes_of(pool), "none"
  fresh()
  for k = M.class(pool, request.need), #all do
    if gauge.get(all[k].queue) > 0 and not (first and k == request.class) then
      why = "full"
    else
      while true do
        local instance, full = choose(all[k], request)
        if full then
          why = "full"
        end
        if not instance then
          break
        end
        -- Other workers choose at the same time: what counts is what was booked.
        local name, broken = flight[instance.id], known_of(instance).open
        if gauge.add(name, 1) > instance.limit then
          gauge.add(name, -1)
        elseif broken and not state:add("probe:" .. instance.id, 1, PROBE) then
          gauge.add(name, -1)
        else
          request.probe = broken and true or nil
          return instance
        end
      end
    end
  end
  return nil, why
end

-- Book that a request is no longer with its instance.
function M.give(instance)
  gauge.add(flight[instance.id], -1)
end

return M
