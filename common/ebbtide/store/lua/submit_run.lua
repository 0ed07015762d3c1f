-- ARGV: term, run, spec, submitter, quota in bytes. Creates a run at the end of the fleet's list. Returns 1, or 0 if the same run
-- exists.
local bad = deposed(ARGV[1]); if bad then return bad end
local last = redis.call('ZRANGE', INDEX, -1, -1, 'WITHSCORES')
redis.call('ZADD', INDEX, 'NX', tonumber(last[2] or 0) + 1, ARGV[2])
local spec = redis.call('HGET', RUN, 'spec')
if spec then
  if spec ~= ARGV[3] then return refuse('TAKEN') end
  return 0
end
redis.call('HSET', RUN, 'spec', ARGV[3], 'status', 'PENDING', 'message', 'waits for a trainer', 'version', 0, 'seq', 0,
  'kept', history_limit_of(ARGV[5]), 'created', string.format('%.0f', now_ms()), 'submitter', ARGV[4])
redis.call('HSET', FENCE, 'term', ARGV[1])
emit('status', 'PENDING', 'submitted; waits for a trainer', '{}', '{"status":"PENDING"}')
return 1
