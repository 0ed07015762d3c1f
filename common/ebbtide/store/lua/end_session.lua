-- ARGV: term, role, fence, session, owner, drop reason ('' if it becomes trajectories), record ('' to leave it), then packed trajectory,
-- number of rollouts that it counts for of each. Ends a session, once: from here on these rollouts count as training ones. Returns {its
-- row, then id, attempt or '' of each rollout that was open, in turn}.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local id = ARGV[4]
local row = session_row(id, ARGV[5])
if not row then return refuse('SESSION') end
if row[4] ~= 'open' then return {row} end
local counted = 0
for at = 9, #ARGV, 2 do counted = counted + tonumber(ARGV[at]) end
local rollouts = redis.call('LLEN', KEPT .. id)
if counted > rollouts then return refuse('COUNTED', tostring(rollouts)) end
local ran = {}
redis.call('ZREM', IDLE, id)  -- first: a store that is out of memory allows it, and then what follows
if ARGV[7] ~= '' then redis.call('HSET', SESSION .. id, 'record', ARGV[7]) end
end_session(id, ARGV[6] == '' and 'completed' or 'dropped', ARGV[6], ran)
for at = 8, #ARGV, 2 do
  local n = tonumber(ARGV[at + 1])
  redis.call('XADD', TRAJECTORIES, '*', 'n', n, 'data', ARGV[at], 'at', string.format('%.0f', now_ms()))
  count('submitted', n)
  count('trajectories', n)
  count('bytes', #ARGV[at])
end
settle()
local out = {session_row(id, '')}
for i = 1, #ran do out[i + 1] = ran[i] end
return out
