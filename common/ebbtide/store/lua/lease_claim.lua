-- ARGV: term, role, new fence, holder, ttl in ms. Takes a lease. If another holds it, the refusal has its rest in ms and its holder.
local bad = barred(ARGV[1]); if bad then return bad end
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
return 1
