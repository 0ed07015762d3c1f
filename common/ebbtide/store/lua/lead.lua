-- ARGV: term, address, the lease's time to live in ms, how. 'look'; 'seize': lead at once, which bars the former leader; 'wait': lead
-- if the lease is free; 'renew'; 'release'. Returns the address of another holder of the lease ('look': of any), or ''.
local how = ARGV[4]
if how == 'renew' or how == 'release' then
  local bad = deposed(ARGV[1])
  if bad then return bad end
end
-- A store that is out of memory still extends a lease, but cannot set one.
if how == 'renew' and redis.call('PEXPIRE', LEADER, ARGV[3]) == 1 then return '' end
if how == 'release' then
  redis.call('DEL', LEADER)
  return ''
end
local term, address = string.match(redis.call('GET', LEADER) or '', '^(%S*) (.*)$')
if term and (how == 'look' or how == 'wait' and term ~= ARGV[1]) then
  -- The store's clock was set back: the lease of a leader that died would last until the clock has caught up.
  if redis.call('PTTL', LEADER) > tonumber(ARGV[3]) then redis.call('PEXPIRE', LEADER, ARGV[3]) end
  return address
end
if how == 'look' then return '' end
redis.call('SET', TERM, ARGV[1])
redis.call('SET', LEADER, ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
return ''
