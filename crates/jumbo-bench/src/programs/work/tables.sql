create table a as with recursive t(i) as (select 1 union all select i + 1 from t where i < SIZE)
    select i, i * 2654435761 % SIZE as key, 'some text of row ' || i as text from t;
create index a_key on a(key);
select count(*), sum(length(y.text)) from a x join a y on x.i = y.key;
select key % 1000 as k, count(*), max(text) from a group by k order by max(text) limit 3;
