-- ARGV: term, most bytes, then id, attempt, worker of each. Gives queued rollouts to workers; a repeat of the same attempt gets the same
-- answer. Returns per rollout {req, prompt, tokens so far, attempts}, or 0 if it is no longer queued. It ends after the rollout that makes
-- the bytes full; the rest stay queued.
local bad = barred(ARGV[1]); if bad then return bad end
local out, bytes = {}, 0
for at = 3, #ARGV, 3 do
  if bytes >= tonumber(ARGV[2]) then break end
  local id, attempt, worker = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'attempts', 'worker', 'req', 'prompt')
  if r[1] == 'queued' or (r[1] == 'running' and r[2] == attempt) then
    local tokens = redis.call('GET', TOKENS .. id) or ''
    local stored, attempts = #tokens / 12, tonumber(r[3])
    if r[1] == 'queued' then
      attempts = attempts + 1
      redis.call('HSET', FENCE, 'r:' .. id, attempt)
      redis.call('HSET', ROLLOUT .. id, 'state', 'running', 'attempt', attempt, 'attempts', attempts, 'worker', worker,
        'from', stored, 'begin', age())
      count('queued', -1)
      count('running', 1)
      count('attempts', 1)
      if attempts > 1 then
        if stored > 0 then count('resumed_midway', 1); count('tokens_resumed', stored) end
        emit('resumed', '', id .. ' goes on at token ' .. stored, cjson.encode({offset = stored, attempt = attempts}),
          cjson.encode({rollout = id, from = r[4], to = worker}))
      end
    end
    out[#out + 1] = {r[5], r[6], tokens, attempts}
    bytes = bytes + #r[5] + #r[6] + #tokens
  else
    out[#out + 1] = 0
  end
end
settle()
return out
