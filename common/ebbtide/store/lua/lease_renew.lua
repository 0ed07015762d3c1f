-- ARGV: term, role, fence, ttl in ms. Whoever holds the fence may renew, even late, while nobody else has claimed.
local bad = barred(ARGV[1], ARGV[2], ARGV[3])
if bad then return bad end
redis.call('SET', CLAIM .. ARGV[2], redis.call('HGET', FENCE, 'holder:' .. ARGV[2]), 'PX', ARGV[4])
return 1
