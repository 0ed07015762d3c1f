-- ARGV: term, role, new fence, holder, ttl in ms. Takes a lease. If another holds it, the refusal has its rest in ms and its holder.
-- Returns the number of the claim, which counts those of the role; of a gateway's, 0.
-- Each gateway has a lease of its own, which leaves the run's status as it is; those that were silent for long go.
local SILENT_MS, MOST_GATEWAYS = 3600000, 1024
local bad = barred(ARGV[1]); if bad then return bad end
if of_gateway(ARGV[2]) then
  for _, silent in ipairs(redis.call('ZRANGEBYSCORE', GATEWAYS, '-inf', age() - SILENT_MS, 'LIMIT', 0, 16)) do drop_gateway(silent) end
  if not redis.call('ZSCORE', GATEWAYS, ARGV[4]) and redis.call('ZCARD', GATEWAYS) >= MOST_GATEWAYS then
    return refuse('GATEWAYS', tostring(MOST_GATEWAYS))
  end
  redis.call('ZADD', GATEWAYS, age(), ARGV[4])
  redis.call('HSET', FENCE, 'lease:' .. ARGV[2], ARGV[3])
  return 0
end
local holder = redis.call('GET', CLAIM .. ARGV[2])
if holder and holder ~= ARGV[4] then
  return refuse('HELD', redis.call('PTTL', CLAIM .. ARGV[2]) .. ' ' .. holder)
end
redis.call('SET', CLAIM .. ARGV[2], ARGV[4], 'PX', ARGV[5])
redis.call('HSET', FENCE, 'lease:' .. ARGV[2], ARGV[3], 'holder:' .. ARGV[2], ARGV[4])
if redis.call('HGET', RUN, 'status') == 'PENDING' then
  redis.call('HSET', RUN, 'status', 'RUNNING', 'message', '')
  emit('status', 'RUNNING', ARGV[4] .. ' took the ' .. ARGV[2] .. ' lease', '{}', '{"status":"RUNNING"}')
end
return redis.call('HINCRBY', FENCE, 'claims:' .. ARGV[2], 1)
