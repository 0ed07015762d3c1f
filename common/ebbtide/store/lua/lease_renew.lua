-- ARGV: term, role, fence, ttl in ms. Renews a lease. The fence's holder may do so even late, until another claims it.
-- A store that is out of memory still extends a lease, but cannot set one.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
if of_gateway(ARGV[2]) then
  redis.pcall('ZADD', GATEWAYS, age(), string.sub(ARGV[2], 9))
  return 1
end
if redis.call('PEXPIRE', CLAIM .. ARGV[2], ARGV[4]) == 0 then
  redis.call('SET', CLAIM .. ARGV[2], redis.call('HGET', FENCE, 'holder:' .. ARGV[2]), 'PX', ARGV[4])
end
return 1
