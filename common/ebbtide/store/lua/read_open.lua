-- ARGV: after which place in line, how many. Returns {place, state, attempt, req, tokens of the prompt, tokens stored, barren attempts in
-- a row, workers to avoid} of queued and running rollouts, oldest first.
local out = {}
local line = redis.call('ZRANGEBYSCORE', OPEN, '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
for i = 1, #line, 2 do
  local id = line[i]
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'req', 'barren', 'avoid')
  out[#out + 1] = {line[i + 1], r[1], r[2] or '', r[3], redis.call('HSTRLEN', ROLLOUT .. id, 'prompt') / 4,
    redis.call('STRLEN', TOKENS .. id) / 12, tonumber(r[4]), r[5] or ''}
end
return out
