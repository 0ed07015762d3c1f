-- ARGV: term, role, fence, session, owner, request, packed turn, quota in bytes, most turns and most rollouts of a session, then the
-- turn's rollouts. Adds a turn, unless it is here; its rollouts are kept as long as the session is. Returns {number, age in ms, packed
-- turn} as stored.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local id, request = ARGV[4], ARGV[6]
local row = session_row(id, ARGV[5])
if not row then return refuse('SESSION') end
local known = redis.call('HGET', TURN_IDS .. id, request)
if known then
  local at, turn = string.match(redis.call('LINDEX', TURNS .. id, known - 1), '^(%-?%d+) (.*)$')
  return {tonumber(known), age() - at, turn}
end
if row[4] ~= 'open' then return refuse('OVER', row[4] .. ' ' .. row[5]) end
local rollouts = #ARGV - 10
if row[6] >= tonumber(ARGV[9]) or redis.call('LLEN', KEPT .. id) + rollouts > tonumber(ARGV[10]) then
  return refuse('TURNS', tostring(row[6]))
end
for at = 11, #ARGV do
  if redis.call('HEXISTS', KEPT_BY, ARGV[at]) == 1 then return refuse('ROLLOUT', tostring(at - 11)) end
  -- A turn comes before its rollouts, so any that is here, or was, is another's.
  if redis.call('EXISTS', ROLLOUT .. ARGV[at]) == 1 or is_over(ARGV[at]) then return refuse('KNOWN', tostring(at - 11)) end
end
local bytes = #ARGV[7] + TURN_BYTES + rollouts * KEPT_BYTES
local full = beyond_quota(bytes, ARGV[8], ARGV[2]); if full then return full end
local number = redis.call('RPUSH', TURNS .. id, age() .. ' ' .. ARGV[7])
redis.call('HSET', TURN_IDS .. id, request, number)
redis.call('HINCRBY', SESSION .. id, 'turns', 1)
redis.call('HINCRBY', SESSION .. id, 'held', bytes)
redis.call('ZADD', IDLE, age(), id)
for at = 11, #ARGV do
  redis.call('RPUSH', KEPT .. id, ARGV[at])
  redis.call('HSET', KEPT_BY, ARGV[at], id)
  redis.call('ZADD', REQUESTS, 'XX', 'inf', ARGV[at])
end
count('bytes', bytes)
settle()
return {number, 0, ARGV[7]}
