-- ARGV: term, then id, attempt, worker, any ('1' if the attempt is known to be newer than all of the store's) of each.
-- Records attempts as running that their workers continue, and whose placement the store may have forgotten. Returns per attempt
-- {1 it runs | 0 it is over | 2 the rollout is unknown, tokens stored}.
local bad = barred(ARGV[1]); if bad then return bad end
local out = {}
for at = 2, #ARGV, 4 do
  local id, attempt, worker, any = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'attempts')
  local stored = redis.call('STRLEN', TOKENS .. id) / 12
  if not r[1] then out[#out + 1] = {is_over(id) and 0 or 2, 0}
  elseif r[1] == 'running' and r[2] == attempt then out[#out + 1] = {1, stored}
  elseif r[1] == 'finished' or (any ~= '1' and (r[1] == 'running' or (r[2] and r[2] ~= attempt))) then out[#out + 1] = {0, stored}
  else
    if r[1] == 'running' then log_span(span(id), 'its end was forgotten', CAUSE.NOT_HELD)
    else count('queued', -1); count('running', 1) end
    redis.call('HSET', FENCE, 'r:' .. id, attempt)
    redis.call('HSET', ROLLOUT .. id, 'state', 'running', 'attempt', attempt, 'worker', worker, 'from', stored, 'begin', age())
    if r[2] ~= attempt then
      redis.call('HINCRBY', ROLLOUT .. id, 'attempts', 1)
      count('attempts', 1)
    end
    out[#out + 1] = {1, stored}
  end
end
settle()
return out
