-- ARGV: a place in the queue, how many. Returns {place, state, attempt, req, tokens of the prompt, tokens stored, latest attempts without
-- a new token, workers to avoid, step} of queued and running rollouts after this place, oldest first.
local out = {}
local queue = redis.call('ZRANGEBYSCORE', OPEN, '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
for i = 1, #queue, 2 do
  local id = queue[i]
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'req', 'barren', 'avoid', 'step')
  out[#out + 1] = {queue[i + 1], r[1], r[2] or '', r[3], redis.call('HSTRLEN', ROLLOUT .. id, 'prompt') / 4,
    redis.call('STRLEN', TOKENS .. id) / 12, tonumber(r[4]), r[5] or '', tonumber(r[6] or 0)}
end
return out
