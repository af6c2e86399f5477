import java.util.HashMap;

/** Objects that live and objects that die, for a collector. */
public class Main {
    public static void main(String[] arguments) {
        int size = Integer.parseInt(arguments[0]);
        HashMap<String, long[]> map = new HashMap<>();
        long sum = 0;
        for (int round = 0; round < 4; round++) {
            for (int i = 0; i < size; i++) {
                String key = "key " + (i * 2654435761L % size);
                long[] value = map.computeIfAbsent(key, name -> new long[8]);
                sum += value[round]++ + key.length();
            }
        }
        System.out.println(sum + " " + map.size());
    }
}
