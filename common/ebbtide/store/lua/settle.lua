-- ARGV: term, a lease's time to live in ms, then the roles. The store may have forgotten the newest entries that others have seen of
-- this run. New entries get numbers that nobody has seen, and leases that could not be renewed last on. Returns 1, or 0 if the run is
-- over or gone.
if redis.call('EXISTS', FENCE) == 0 then return 0 end
local bad = barred(ARGV[1]); if bad then return bad end
local AHEAD_MS = 60000  -- more than the clocks of primary and replica differ, and more than the entries that a replica lacks
-- The run's age on top: if the store forgets this call, too, the next one uses other numbers.
local ahead = AHEAD_MS + math.max(0, tonumber(age()))  -- the clock may have been set back
redis.call('HINCRBY', RUN, 'events', 1000000 + ahead)
local streams = {FINISHED, TRAJECTORIES, SPANS}
if redis.call('EXISTS', REQUEST_SPANS) == 1 then streams[4] = REQUEST_SPANS end
for _, stream in ipairs(streams) do
  local last = last_number(stream)
  local id = string.format('%.0f-0', math.max(now_ms(), tonumber(last)) + ahead)
  redis.call('XADD', stream, id, 'x', '')
  redis.call('XDEL', stream, id)
end
for i = 3, #ARGV do
  local holder = redis.call('HGET', FENCE, 'holder:' .. ARGV[i])
  if holder then redis.call('SET', CLAIM .. ARGV[i], holder, 'PX', ARGV[2]) end
end
return 1
