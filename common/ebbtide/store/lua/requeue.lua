-- ARGV: term, reason, its cause (a number), blame ('1' if the rollout itself may be the reason), avoid ('1' if it must not return to
-- this worker), moved ('1' if the coordinator moved it), seconds in which the worker's loss was noticed ('' if it was not lost), then
-- id, attempt, most tokens lost with it of each. Ends attempts and puts their rollouts back into their places in the queue. Returns per
-- rollout {stored, latest attempts without a new token, evidence, workers to avoid}, or 0 if that attempt no longer runs.
local AVOIDED = 16  -- workers remembered per rollout, the newest
local bad = barred(ARGV[1]); if bad then return bad end
local reason, ended, out = ARGV[2], 0, {}
for at = 8, #ARGV, 3 do
  local id = ARGV[at]
  local r = redis.call('HMGET', ROLLOUT .. id, 'state', 'attempt', 'from', 'barren', 'worker', 'evidence', 'avoid')
  if r[2] == ARGV[at + 1] and (r[1] == 'running' or r[1] == 'queued') then
    local stored, barren, evidence, avoid = redis.call('STRLEN', TOKENS .. id) / 12, tonumber(r[4]), r[6] or '', r[7] or ''
    if r[1] == 'running' then
      redis.call('HDEL', FENCE, 'r:' .. id)
      if stored > tonumber(r[3]) then barren, evidence = 0, ''
      elseif ARGV[4] == '1' then
        barren = barren + 1
        evidence = evidence .. 'attempt on ' .. r[5] .. ' at token ' .. stored .. ': ' .. reason .. '; '
      end
      if ARGV[5] == '1' and not string.find(',' .. avoid, ',' .. r[5] .. ',', 1, true) then
        avoid = r[5] .. ',' .. avoid
        avoid = string.match(avoid, '^' .. string.rep('[^,]*,', AVOIDED)) or avoid
      end
      log_span(span(id), reason, ARGV[3])
      redis.call('HSET', ROLLOUT .. id, 'state', 'queued', 'barren', barren, 'evidence', evidence, 'avoid', avoid)
      count('running', -1)
      count('queued', 1)
      count('tokens_lost_at_most', tonumber(ARGV[at + 2]))
      ended = ended + 1
    end
    out[#out + 1] = {stored, barren, evidence, avoid}
  else
    out[#out + 1] = 0
  end
end
if ARGV[6] == '1' then count('moved', ended) end
if ARGV[7] ~= '' and ended > 0 then observe('detection', tonumber(ARGV[7])) end
settle()
return out
