-- Cases for pool.lua and queue.lua, run by test_balance.py: one line a case, "ok NAME" or
-- "failed NAME: why". Arguments: the folder of the modules, the folder of this file, a folder for
-- drain marks.
package.path = arg[1] .. "/?.lua;" .. arg[2] .. "/?.lua;" .. package.path
local stub = require "ngx_stub"
local marks = arg[3]

local function instance(name, more)
  local one = {host = "h", name = name, id = "h/" .. name, limit = 1000, loras = {}}
  for key, value in pairs(more or {}) do
    one[key] = value
  end
  return one
end

-- A pool `m` of these instances, all ready.
local function pool(...)
  local one = {name = "m", instances = {...}, loras = {}}
  stub.reset({one})
  for _, each in ipairs(one.instances) do
    stub.call(1, function(w) w.pool.set_ready(each, true) end)
  end
  return one
end

local function request(more)
  local one = {pool = "m", key = {name = "-"}, need = 10, tried = {}, queued_ms = 0, class = 1}
  for key, value in pairs(more or {}) do
    one[key] = value
  end
  return one
end

-- The name of the instance that a request gets, or why it gets none.
local function take(where, more, pid)
  return stub.call(pid or 1, function(w)
    local got, why = w.pool.take(where, request(more))
    return got and got.name or why
  end)
end

local function give(one)
  stub.call(1, function(w) w.pool.give(one) end)
end

local function equal(got, wanted)
  if got ~= wanted then
    error(tostring(got) .. " instead of " .. tostring(wanted), 2)
  end
end

local function logged(text)
  for _, line in ipairs(stub.logged) do
    if line:find(text, 1, true) then
      return true
    end
  end
  return false
end

local cases = {}

function cases.fewest_in_flight()
  local a, b = instance("a"), instance("b")
  local m = pool(a, b)
  local counts = {a = 0, b = 0}
  for _ = 1, 20 do
    local name = take(m)
    counts[name] = counts[name] + 1
  end
  equal(counts.a, 10)
  for _ = 1, 5 do
    give(b)
  end
  for _ = 1, 5 do
    equal(take(m), "b")
  end
end

function cases.not_what_was_tried_is_drained_or_not_ready()
  local m = pool(instance("a"), instance("b"))
  equal(take(m, {tried = {["h/a"] = true}}), "b")
  stub.call(1, function(w) w.pool.set_ready(m.instances[1], false, "test") end)
  equal(take(m), "b")
  equal(take(m, {tried = {["h/b"] = true}}), "none")
end

function cases.limits_hold_over_workers()
  local m = pool(instance("a", {limit = 2}), instance("b", {limit = 1}))
  local counts = {a = 0, b = 0, full = 0}
  for n = 1, 5 do
    local name = take(m, nil, n % 2 + 1)
    counts[name] = counts[name] + 1
  end
  equal(counts.a, 2)
  equal(counts.b, 1)
  equal(counts.full, 2)
end

function cases.smallest_context_that_fits_and_overflow_up()
  local m = pool(instance("large", {max_model_len = 1000, limit = 2}),
                 instance("small", {max_model_len = 100, limit = 1}),
                 instance("middle", {max_model_len = 500, limit = 1}))
  equal(take(m, {need = 101}), "middle")
  equal(take(m, {need = 100}), "small")
  equal(take(m, {need = 100}), "large")  -- small and middle are full
  equal(take(m, {need = 9999}), "large")  -- nothing fits: the engine decides
  equal(take(m, {need = 600}), "full")  -- small would be free
  give(m.instances[2])
  equal(take(m, {need = 600}), "full")
  equal(take(m, {need = 600, tried = {["h/large"] = true}}), "none")
end

function cases.an_unknown_length_counts_as_the_largest()
  local m = pool(instance("unknown"), instance("small", {max_model_len = 100}))
  equal(take(m, {need = 50}), "small")
  equal(take(m, {need = 5000}), "unknown")
end

function cases.adapters()
  local m = pool(instance("a", {loras = {"sql"}}), instance("b"))
  for _ = 1, 4 do
    equal(take(m, {lora = "sql"}), "a")
  end
end

function cases.sessions_are_spread_evenly_and_stay()
  for _, size in ipairs({2, 3, 5, 8}) do
    local all = {}
    for n = 1, size do
      all[n] = instance(string.rep("n", n))
    end
    local m = pool(unpack(all))
    local counts, home = {}, {}
    for round = 1, 2 do
      for session = 1, 4000 do
        local name = take(m, {affinity = ngx.crc32_long("session " .. session)})
        if round == 1 then
          home[session] = name
          counts[name] = (counts[name] or 0) + 1
        else
          equal(name, home[session])
        end
        give(all[#name])
      end
    end
    for _, count in pairs(counts) do
      local share = count * size / 4000
      assert(share > 0.85 and share < 1.15, share .. " of an even share")
    end
  end
end

function cases.one_instance_less_moves_only_its_sessions()
  local m = pool(instance("a"), instance("b"), instance("c"))
  local home = {}
  local function where(session)
    local name = take(m, {affinity = ngx.crc32_long("s" .. session)})
    give(m.instances[name:byte() - 96])
    return name
  end
  for session = 1, 200 do
    home[session] = where(session)
  end
  stub.call(1, function(w) w.pool.set_ready(m.instances[2], false, "test") end)
  for session = 1, 200 do
    local name = where(session)
    assert(name == home[session] or home[session] == "b")
  end
end

function cases.a_hot_session_is_bounded()
  local m = pool(instance("a"), instance("b"), instance("c"), instance("d"))
  local counts, total = {}, 0
  for _ = 1, 400 do
    local name = take(m, {affinity = 77})
    counts[name] = (counts[name] or 0) + 1
    total = total + 1
    for _, count in pairs(counts) do
      assert(count <= math.max(2, 1.3 * total / 4 + 1e-9) or count <= math.ceil(total / 4),
             count .. " of " .. total)
    end
  end
  local most = 0
  for _, count in pairs(counts) do
    most = math.max(most, count)
  end
  equal(most, 130)
end

local function fail(m, one, probe)
  stub.call(1, function(w) w.pool.failed(one, "test", probe) end)
end

function cases.breaker()
  local a, b = instance("a"), instance("b")
  local m = pool(a, b)
  for _ = 1, 4 do
    fail(m, a)
  end
  stub.call(1, function(w) w.pool.worked(a) end)  -- not in a row
  for _ = 1, 4 do
    fail(m, a)
  end
  equal(stub.call(1, function(w) return w.pool.why_not(a) end), nil)
  for _ = 1, 20 do  -- those that were under way count once
    fail(m, a)
  end
  equal(stub.call(1, function(w) return w.pool.why_not(a) end), "broken")
  equal(take(m, {tried = {["h/b"] = true}}), "none")
  stub.now = stub.now + 1.1
  -- one request tries it
  local trial = request({tried = {["h/b"] = true}})
  equal(stub.call(1, function(w) return w.pool.take(m, trial).name end), "a")
  equal(trial.probe, true)
  equal(take(m, {tried = {["h/b"] = true}}, 2), "none")
  fail(m, a, true)
  stub.now = stub.now + 1.1
  equal(take(m, {tried = {["h/b"] = true}}), "none")  -- out for two seconds now
  stub.now = stub.now + 1
  equal(take(m, {tried = {["h/b"] = true}}), "a")
  stub.call(1, function(w) w.pool.worked(a) end)
  equal(take(m, {tried = {["h/b"] = true}}), "a")
  assert(logged("h/a answers again"))
  assert(logged("journalctl -u vllm@a` on h"))
end

function cases.breaker_waits_no_longer_than_a_minute()
  local a = instance("a")
  local m = pool(a)
  for _ = 1, 5 do
    fail(m, a)
  end
  for _ = 1, 12 do
    fail(m, a, true)
  end
  equal(take(m), "none")
  stub.now = stub.now + 61
  equal(take(m), "a")
  equal(take(m), "none")
  stub.now = stub.now + 11  -- the trial has not ended; another one may go
  equal(take(m), "a")
end

function cases.an_instance_that_was_down_begins_anew()
  local a = instance("a")
  local m = pool(a)
  for _ = 1, 5 do
    fail(m, a)
  end
  stub.call(1, function(w) w.pool.said_ready(a, true) end)
  equal(take(m), "none")  -- it never said that it was down
  stub.call(1, function(w) w.pool.said_ready(a, false, "starting") end)
  stub.call(1, function(w) w.pool.said_ready(a, true) end)
  equal(take(m), "a")
end

function cases.drain_marks()
  local m = pool(instance("a"), instance("b"))
  take(m)
  take(m)
  stub.call(1, function(w) w.pool.open(marks) end)
  equal(stub.call(1, function(w) return w.pool.drain("h/a") end), 1)
  equal(take(m, nil, 2), "b")
  equal(stub.call(2, function(w) return w.pool.why_not(m.instances[1]) end), "drained")
  local got, why = stub.call(1, function(w) return w.pool.drain("h/c") end)
  equal(got, nil)
  equal(why, "no pool has an instance `h/c`")
  -- memory is gone, the file is not
  stub.reset({m})
  for _, each in ipairs(m.instances) do
    stub.call(1, function(w) w.pool.set_ready(each, true) end)
  end
  stub.call(1, function(w) w.pool.open(marks) end)
  equal(take(m), "b")
  assert(os.remove(marks .. "/h:a"))
  stub.call(1, function(w) w.pool.recall() end)
  equal(take(m), "a")
  assert(logged("h/a is no longer drained"))
  stub.call(1, function(w)
    assert(w.pool.drain("h/b"))
    assert(w.pool.undrain("h/b"))
  end)
  equal(io.open(marks .. "/h:b"), nil)
end

-- A request that waits in the queue of a worker, has its instance for `seconds`, and notes its end.
local function client(pid, m, owner, seconds, done, more)
  local one = request({key = {name = owner}, start = stub.now})
  for key, value in pairs(more or {}) do
    one[key] = value
  end
  local task = stub.spawn(pid, function(w)
    local why
    one.instance, why = w.pool.take(m, one)
    if not one.instance then
      local ok
      ok, why = w.queue.wait(m, one, stub.now + (one.seconds or 1000), one.most or 1000)
      if not ok then
        done[#done + 1] = why
        return
      end
    end
    stub.sleep(seconds)
    w.pool.give(one.instance)
    w.queue.freed("m")
    done[#done + 1] = owner
  end)
  return task, one
end

local function count(done, name, from, to)
  local found = 0
  for i = from, to do
    found = found + (done[i] == name and 1 or 0)
  end
  return found
end

local function queued()
  return stub.call(1, function(w) return w.gauge.get("queued:m") .. "," .. w.gauge.get("queued:m:1") end)
end

function cases.owners_take_turns_over_workers()
  local m = pool(instance("a", {limit = 1}))
  local done = {}
  for n = 1, 40 do
    client(n % 2 + 1, m, "many", 0.5, done)
  end
  for _ = 1, 10 do
    client(2, m, "few", 0.5, done)
    client(1, m, "some", 0.5, done)
  end
  equal(queued(), "59,59")
  stub.run(60)
  equal(#done, 60)
  -- the ten of each of the others are through after about thirty
  for _, name in ipairs({"few", "some"}) do
    equal(count(done, name, 1, 35), 10)
    assert(count(done, name, 1, 18) >= 4)
  end
  equal(queued(), "0,0")
  equal(take(m), "a")
end

function cases.one_owner_alone_is_served_in_order()
  local m = pool(instance("a", {limit = 2}))
  local done = {}
  for n = 1, 12 do
    client(1, m, n, 1, done)
  end
  stub.run(20)
  for n = 1, 12 do
    equal(done[n], n)
  end
end

function cases.a_late_owner_has_no_credit()
  local m = pool(instance("a", {limit = 1}))
  local done = {}
  for _ = 1, 50 do
    client(1, m, "early", 1, done)
  end
  stub.run(20)
  for _ = 1, 20 do
    client(2, m, "late", 1, done)
  end
  local before = #done
  stub.run(20)
  local late = count(done, "late", before + 1, #done)
  assert(late >= 8 and late <= 12, late .. " of twenty")
end

function cases.an_owner_that_comes_back_has_no_credit()
  local m = pool(instance("a", {limit = 1}))
  local done = {}
  for _ = 1, 3 do
    client(1, m, "late", 0.1, done)
  end
  stub.run(1)
  for _ = 1, 60 do
    client(1, m, "early", 1, done)
  end
  stub.run(30)
  for _ = 1, 20 do
    client(1, m, "late", 1, done)
  end
  local before = #done
  stub.run(20)
  local late = count(done, "late", before + 1, #done)
  assert(late >= 8 and late <= 12, late .. " of twenty")
end

function cases.nobody_overtakes_those_who_wait()
  local a = instance("a", {limit = 1})
  local m = pool(a)
  local done = {}
  take(m, nil, 2)
  client(1, m, "x", 1, done)
  give(a)  -- by another worker: the one that waits has not seen it yet
  equal(take(m, nil, 2), "full")
  stub.run(0.1)
  equal(queued(), "0,0")
end

function cases.places_are_not_left_free()
  local m = pool(instance("a", {limit = 4}))
  local done = {}
  for n = 1, 200 do
    client(n % 3 + 1, m, "o" .. n % 5, 1, done)
  end
  stub.run(55)  -- fifty seconds of work for four at once, and some slack for hand-overs
  equal(#done, 200)
end

function cases.queue_is_bounded()
  local m = pool(instance("a", {limit = 1}))
  local done = {}
  client(1, m, "x", 1000, done)
  client(1, m, "x", 1, done, {most = 2})
  client(2, m, "x", 1, done, {most = 2, seconds = 5})
  client(1, m, "x", 1, done, {most = 2})
  equal(done[1], "full")
  equal(queued(), "2,2")
  stub.run(6)
  equal(done[2], "time")
  equal(queued(), "1,1")
end

function cases.who_leaves_frees_the_place()
  local m = pool(instance("a", {limit = 1}))
  local done = {}
  client(1, m, "x", 3, done)
  local task, gone = client(1, m, "x", 1, done)
  client(1, m, "y", 1, done)
  stub.kill(task)
  stub.call(1, function(w) w.queue.leave(gone) end)
  equal(queued(), "1,1")
  stub.run(5)
  equal(table.concat(done, " "), "x y")
  equal(queued(), "0,0")
end

function cases.a_killed_worker_does_not_block_the_others()
  local m = pool(instance("a", {limit = 1}))
  local done = {}
  client(1, m, "x", 1, done)
  local task = client(2, m, "first", 1, done)
  stub.call(1, function(w) client(1, m, "second", 1, done) return w end)
  stub.run(0.5)
  stub.kill(task)
  stub.call(2, function(w)  -- as the sweep does
    w.gauge.add("queued:m", -1)
    w.gauge.add("queued:m:1", -1)
  end)
  stub.run(5)
  equal(table.concat(done, " "), "x second")
end

function cases.those_who_wait_for_a_large_one_come_before_overflow()
  local m = pool(instance("small", {max_model_len = 100, limit = 1}),
                 instance("large", {max_model_len = 1000, limit = 1}))
  local done = {}
  client(1, m, "on small", 1000, done)
  client(1, m, "on large", 1, done, {need = 500, class = 2})
  client(1, m, "short", 1, done)
  client(1, m, "long", 1, done, {need = 500, class = 2})
  client(1, m, "long", 1, done, {need = 500, class = 2})
  stub.run(10)
  equal(table.concat(done, ", "), "on large, long, long, short")
end

function cases.overflow_leaves_the_large_one_to_another_workers_long_request()
  local m = pool(instance("small", {max_model_len = 100, limit = 1}),
                 instance("large", {max_model_len = 1000, limit = 1}))
  local done = {}
  client(1, m, "on small", 1000, done)
  client(1, m, "on large", 1, done, {need = 500, class = 2})
  client(1, m, "short", 1, done)
  client(2, m, "long", 1, done, {need = 500, class = 2})
  stub.run(10)
  equal(table.concat(done, ", "), "on large, long, short")
end

function cases.without_an_instance_the_wait_ends()
  local a = instance("a", {limit = 1})
  local m = pool(a)
  local done = {}
  client(1, m, "x", 1, done)
  client(1, m, "x", 1, done)
  client(1, m, "x", 1, done)
  stub.call(1, function(w) w.pool.set_ready(a, false, "test") end)
  stub.run(2)
  equal(table.concat(done, " "), "none none x")
  equal(queued(), "0,0")
end

local names = {}
for name in pairs(cases) do
  names[#names + 1] = name
end
table.sort(names)
for _, name in ipairs(names) do
  local ok, why = pcall(cases[name])
  print(ok and "ok " .. name or "failed " .. name .. ": " .. tostring(why))
end
