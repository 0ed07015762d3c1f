-- ARGV: term, then id, message of each. Finishes queued rollouts that cannot be generated as dead letters. Returns how many.
local bad = barred(ARGV[1]); if bad then return bad end
local ended = 0
for at = 2, #ARGV, 2 do
  local id = ARGV[at]
  if redis.call('HGET', ROLLOUT .. id, 'state') == 'queued' then
    finish(id, 'queued', 'DEAD_LETTERED', ARGV[at + 1])
    count('dead_lettered', 1)
    emit('dead_letter', id, ARGV[at + 1], '{}', cjson.encode({rollout = id}))
    ended = ended + 1
  end
end
settle()
return ended
