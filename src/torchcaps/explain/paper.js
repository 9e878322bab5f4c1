// A sheet to draw on, white on black, which takes image files too. `element`, `props` and `trigger` are Gradio's.
//
// props.value   {kind: "drawing" | "file", name, data}   a picture as a data URL
//               {kind: "large", name, size}              a file above props.limit bytes, which is not sent
//               {kind: "empty"}                          the sheet was cleared
const canvas = element.querySelector("canvas"), pen = canvas.getContext("2d");
const input = element.querySelector("input");
let drawing = false, blank = true, foreign = false;

const clear = () => { pen.fillStyle = "#000"; pen.fillRect(0, 0, canvas.width, canvas.height); blank = true; foreign = false; };
const send = value => { props.value = value; trigger("change"); };
const spot = e => {
  const box = canvas.getBoundingClientRect();
  return [(e.clientX - box.left) * canvas.width / box.width, (e.clientY - box.top) * canvas.height / box.height];
};

const show = (data, name) => {
  clear();
  foreign = true;
  const image = new Image();
  image.onload = () => {
    const scale = Math.min(canvas.width / image.width, canvas.height / image.height);
    const [w, h] = [image.width * scale, image.height * scale];
    pen.imageSmoothingEnabled = scale < 1;
    pen.drawImage(image, (canvas.width - w) / 2, (canvas.height - h) / 2, w, h);
  };
  image.src = data;
  send({kind: "file", name, data});
};

clear();
canvas.addEventListener("pointerdown", e => {
  if (foreign) clear();
  canvas.setPointerCapture(e.pointerId);
  drawing = true;
  blank = false;
  pen.strokeStyle = "#fff";
  pen.lineWidth = canvas.width / 9;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...spot(e));
  pen.lineTo(...spot(e));
  pen.stroke();
});
canvas.addEventListener("pointermove", e => {
  if (!drawing) return;
  pen.lineTo(...spot(e));
  pen.stroke();
});
const lift = () => {
  if (!drawing) return;
  drawing = false;
  send({kind: "drawing", name: "drawing", data: canvas.toDataURL("image/png")});
};
canvas.addEventListener("pointerup", lift);
canvas.addEventListener("pointercancel", lift);

element.querySelector(".clear").addEventListener("click", () => {
  const was = blank && !foreign;
  clear();
  if (!was) send({kind: "empty"});
});
input.addEventListener("change", () => {
  const file = input.files[0];
  if (!file) return;
  if (file.size > props.limit) {
    clear();
    send({kind: "large", name: file.name, size: file.size});
  } else {
    const reader = new FileReader();
    reader.onload = () => show(reader.result, file.name);
    reader.readAsDataURL(file);
  }
  input.value = "";
});
for (const example of element.querySelectorAll(".examples button"))
  example.addEventListener("click", () => show(example.querySelector("img").src, example.title));
canvas.dataset.ready = "";  // all that listens is there
