-- ARGV: term, role, fence, drop reason ('' if trained), trusted (see complete), then ids. All or nothing; ids that are over are skipped.
-- Returns the episodes of the others.
local bad = barred(ARGV[1], ARGV[2], ARGV[3]); if bad then return bad end
local kinds, episodes = {}, {}
for at = 6, #ARGV do
  local r = redis.call('HMGET', ROLLOUT .. ARGV[at], 'state', 'kind', 'origin')
  if r[2] == 'request' then return refuse('UNKNOWN', tostring(at - 6)) end  -- its gateway's
  if r[1] and r[1] ~= 'finished' and ARGV[5] ~= '1' then return refuse('OPEN', tostring(at - 6)) end
  if not r[1] and redis.call('SISMEMBER', DONE, 'r:' .. ARGV[at]) == 0 then return refuse('UNKNOWN', tostring(at - 6)) end
  kinds[ARGV[at]] = r[2]
  episodes[#episodes + 1] = string.match(r[3] or '', '^%S+ (%S+)')
end
for id, kind in pairs(kinds) do
  if kind then
    forget(id)
    close(kind, ARGV[4])
  end
end
settle()
return episodes
