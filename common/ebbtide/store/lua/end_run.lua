-- ARGV: term, role, fence, status, message, drop reason, strict, ttl in seconds, then the roles.
-- Ends a live run and settles its counters; strict refuses while training rollouts are open. Returns 1, or 0 if it had ended.
local bad = barred(ARGV[1], ARGV[2], ARGV[3])
if bad then
  if string.sub(bad['err'], 1, 5) == 'ENDED' then return 0 end
  return bad
end
local function counter(name) return tonumber(redis.call('HGET', COUNT, name) or 0) end
local open = counter('submitted') - counter('trained') - counter('dropped')
if ARGV[7] == '1' and open > 0 then return refuse('UNSETTLED', tostring(open)) end
local ran = {}
for _, field in ipairs(redis.call('HKEYS', FENCE)) do
  if string.sub(field, 1, 2) == 'r:' then ran[#ran + 1] = span(string.sub(field, 3)) end
end
redis.call('DEL', FENCE)
for _, fields in ipairs(ran) do log_span(fields, 'run ended', CAUSE.RUN_ENDED) end
for _, holder in ipairs(redis.call('ZRANGE', GATEWAYS, 0, -1)) do redis.call('DEL', SUBMITS .. 'gateway/' .. holder) end
redis.call('DEL', GATEWAYS)
for i = 9, #ARGV do redis.call('DEL', CLAIM .. ARGV[i], SUBMITS .. ARGV[i]) end
redis.call('HSET', RUN, 'status', ARGV[4], 'message', ARGV[5], 'ended', string.format('%.0f', now_ms()))
count('dropped', open)
count('dropped:' .. ARGV[6], open)
count('requests_completed', counter('requests_submitted') - counter('requests_completed'))
count('sessions_dropped', redis.call('ZCARD', IDLE))
for _, name in ipairs({'queued', 'running', 'finished', 'trajectories', 'bytes'}) do count(name, -counter(name)) end
settle()
emit('status', ARGV[4], ARGV[5], '{}', cjson.encode({status = ARGV[4]}))
redis.call('UNLINK', EVENT_KEYS)
for _, key in ipairs({RUN, COUNT, ACCOUNTS, EVENTS, CHATTER, SPANS, REQUEST_SPANS}) do redis.call('EXPIRE', key, ARGV[8]) end
return 1
