-- ARGV: term, reason, blame ('1' if the rollout itself may be why), then id, attempt of each. Ends attempts; their rollouts go back to
-- their old place in line. Returns per rollout {stored, barren attempts in a row, evidence}, or 0 if that attempt no longer runs.
local bad = barred(ARGV[1])
if bad then return bad end
local out = {}
for at = 4, #ARGV, 2 do
  local id = ARGV[at]
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'from', 'barren', 'worker', 'evidence')
  if r[2] == ARGV[at + 1] and (r[1] == 'running' or r[1] == 'queued') then
    local stored, barren, evidence = redis.call('STRLEN', TOKENS .. id) / 12, tonumber(r[4]), r[6] or ''
    if r[1] == 'running' then
      redis.call('HDEL', FENCE, 'r:' .. id)
      if stored > tonumber(r[3]) then barren, evidence = 0, ''
      elseif ARGV[3] == '1' then
        barren = barren + 1
        evidence = evidence .. 'attempt on ' .. r[5] .. ' at token ' .. stored .. ': ' .. ARGV[2] .. '; '
      end
      redis.call('HSET', ROLLOUT .. id, 'state', 'queued', 'barren', barren, 'evidence', evidence)
      count('running', -1)
      count('queued', 1)
    end
    out[#out + 1] = {stored, barren, evidence}
  else
    out[#out + 1] = 0
  end
end
settle()
return out
