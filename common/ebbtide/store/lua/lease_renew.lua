-- ARGV: term, role, fence, ttl in ms. Whoever holds the fence may renew, even late, while nobody else has claimed.
-- A store that is out of memory lets a lease be prolonged, though not set.
local bad = barred(ARGV[1], ARGV[2], ARGV[3])
if bad then return bad end
if redis.call('PEXPIRE', CLAIM .. ARGV[2], ARGV[4]) == 0 then
  redis.call('SET', CLAIM .. ARGV[2], redis.call('HGET', FENCE, 'holder:' .. ARGV[2]), 'PX', ARGV[4])
end
return 1
