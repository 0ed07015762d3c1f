-- ARGV: term, role, fence, session, owner, drop reason ('' if it becomes trajectories), record ('' to leave it), '1' if more trajectories
-- follow in another call, quota in bytes, verifier ('' for none), data for it, then episode, packed trajectory, number of rollouts that it
-- counts for of each. Ends a session, once: from here on these rollouts count as training ones. If more follow, the trajectories are kept
-- until then. With a verifier they are kept until its verdict. Returns {its row, then id, attempt or '' of each rollout that was open, in
-- turn}.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local id, branches = ARGV[4], BRANCHES .. ARGV[4]
local row = session_row(id, ARGV[5])
if not row then return refuse('SESSION') end
if row[4] ~= 'open' then return {row} end
if ARGV[8] == '1' then
  local bytes = 0
  local function branch(at) return ARGV[at + 2] .. ' ' .. ARGV[at + 1] end
  for at = 12, #ARGV, 3 do bytes = bytes + #branch(at) - redis.call('HSTRLEN', branches, ARGV[at]) end
  local full = bytes > 0 and beyond_quota(bytes, ARGV[9], ARGV[2]); if full then return full end
  for at = 12, #ARGV, 3 do redis.call('HSET', branches, ARGV[at], branch(at)) end
  redis.call('HINCRBY', SESSION .. id, 'held', bytes)
  redis.call('ZADD', IDLE, age(), id)
  count('bytes', bytes)
  settle()
  return {session_row(id, '')}
end
local made, names, counted = {}, {}, 0
if ARGV[6] == '' then
  local before = redis.call('HGETALL', branches)
  for i = 1, #before, 2 do
    local n, data = string.match(before[i + 1], '^(%d+) (.*)$')
    made[before[i]] = {tonumber(n), data}
  end
end
for at = 12, #ARGV, 3 do made[ARGV[at]] = {tonumber(ARGV[at + 2]), ARGV[at + 1]} end
for name, branch in pairs(made) do
  names[#names + 1] = name
  counted = counted + branch[1]
end
local rollouts = redis.call('LLEN', KEPT .. id)
if counted > rollouts then return refuse('COUNTED', tostring(rollouts)) end
table.sort(names)
local ran = {}
redis.call('ZREM', IDLE, id)  -- first: a store that is out of memory allows it, and then what follows
if ARGV[7] ~= '' then redis.call('HSET', SESSION .. id, 'record', ARGV[7]) end
if ARGV[10] ~= '' then
  release_rollouts(id, ran)
  local r = redis.call('HMGET', SESSION .. id, 'held', 'record')
  local held = #r[2] + SESSION_BYTES + #ARGV[11]
  for _, name in ipairs(names) do
    local branch = made[name][1] .. ' ' .. made[name][2]
    redis.call('HSET', branches, name, branch)
    held = held + #branch
  end
  redis.call('HSET', SESSION .. id, 'state', 'verifying', 'verifier', ARGV[10], 'data', ARGV[11], 'held', held, 'unverified',
    redis.call('XADD', UNVERIFIED, '*', 'id', id))
  redis.call('ZADD', IDLE, age(), id)
  count('bytes', held - tonumber(r[1]))
else
  end_session(id, ARGV[6] == '' and 'completed' or 'dropped', ARGV[6], ran)
  for _, name in ipairs(names) do add_trajectory(made[name][1], made[name][2]) end
end
settle()
local out = {session_row(id, '')}
for i = 1, #ran do out[i + 1] = ran[i] end
return out
